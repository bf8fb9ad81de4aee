/*
 * Sessions, their requests, and the callback threads: one a session, started with its first request, so that callbacks
 * are serial within a session and independent between sessions.
 */
#include "internal.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static const char LOST_REPLY[] = "{\"message\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":\"abort\","
    "\"error\":{\"code\":901,\"message\":\"the connection to the service was lost\"}}";

enum { WARN_AFTER_S = 1 };

static struct session *sessions;
static unsigned last_session_id, last_request_id;
static _Thread_local struct session *own_session;  /* of a callback thread */

/* A session on `connection`, with one reference for the caller, not yet in the table. NULL without memory. Lock held. */
struct session *gewu_session_new(struct connection *connection)
{
    struct session *session = calloc(1, sizeof *session);
    pthread_condattr_t monotonic;
    if (session == NULL) {
        return NULL;
    }
    session->id = gewu_next_id(&last_session_id);
    session->refs = 1;
    session->connection = connection;
    connection->refs++;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&session->has_event, NULL);
    pthread_cond_init(&session->is_idle, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return session;
}

/* Puts a session into the table, which takes a reference. Lock held. */
void gewu_session_add(struct session *session)
{
    session->refs++;
    session->next = sessions;
    sessions = session;
}

/* The session with a new reference for the caller, or NULL. Lock held. */
struct session *gewu_session_find(unsigned id)
{
    struct session *session = sessions;
    while (session != NULL && session->id != id) {
        session = session->next;
    }
    if (session != NULL) {
        session->refs++;
    }
    return session;
}

/* Gives up a reference; the last one frees the session, whose requests are gone by then. Lock held. */
void gewu_session_unref(struct session *session)
{
    if (--session->refs > 0) {
        return;
    }
    gewu_connection_unref(session->connection);
    pthread_cond_destroy(&session->has_event);
    pthread_cond_destroy(&session->is_idle);
    free(session->tombstones);
    free(session);
}

static void event_free(struct event *event)
{
    if (event != &event->request->end) {
        free(event->json);
        free(event);
    }
}

/* Hands an event to the session's callback thread. Lock held. */
static void queue_event(struct session *session, struct event *event)
{
    if (session->last_event != NULL) {
        session->last_event->next = event;
    } else {
        session->first_event = event;
    }
    session->last_event = event;
    pthread_cond_signal(&session->has_event);
}

/* Takes the session out of the table, if it is there, with the table's reference. Lock held. */
static void remove_from_table(struct session *session)
{
    struct session **place = &sessions;
    while (*place != NULL && *place != session) {
        place = &(*place)->next;
    }
    if (*place != NULL) {
        *place = session->next;
        gewu_session_unref(session);
    }
}

/* Takes the session out of the table and silences all its requests. The caller holds a reference. Lock held. */
void gewu_session_close(struct session *session)
{
    remove_from_table(session);
    session->is_closed = true;
    while (session->requests != NULL) {
        gewu_request_drop(session, session->requests->id);
    }
    pthread_cond_signal(&session->has_event);
}

/*
 * The connection is gone: each accepted request ends with one "abort"; one whose Submit has not been answered ends with
 * the error of that Submit alone. The sessions stay in the table until that is delivered, so that Destroy can wait for
 * a callback. Lock held.
 */
void gewu_sessions_lost(struct connection *connection, bool (*is_pending)(unsigned request))
{
    struct session *next;
    for (struct session *session = sessions; session != NULL; session = next) {
        next = session->next;
        if (session->connection != connection || session->is_lost) {
            continue;
        }
        session->is_lost = true;
        for (struct request *request = session->requests; request != NULL; request = request->next) {
            if (!request->has_end && !is_pending(request->id)) {
                request->has_end = true;
                request->end = (struct event){.request = request, .is_final = true, .json = (char *)LOST_REPLY};
                queue_event(session, &request->end);
            }
        }
        pthread_cond_signal(&session->has_event);
        if (!session->has_thread) {
            remove_from_table(session);
        }
    }
}

/* In the child of a fork: the sessions are the parent's. Not freed: threads that do not exist here refer to them. */
void gewu_sessions_forget(void)
{
    for (struct session *session = sessions; session != NULL; session = session->next) {
        session->is_closed = true;
        session->first_event = session->last_event = NULL;
    }
    sessions = NULL;
}

/*
 * Registers a request, before it is sent: its first reply may come before Submit returns. NULL without memory. The
 * session owns it until it is dropped or its last reply is delivered. Lock held.
 */
struct request *gewu_request_add(struct session *session, OH_QoS_GewuOnResponse callback, void *context)
{
    struct request *request = calloc(1, sizeof *request);
    struct request **place = &session->requests;
    if (request == NULL) {
        return NULL;
    }
    request->id = gewu_next_id(&last_request_id);
    request->callback = callback;
    request->context = context;
    while (*place != NULL) {  /* in order of submission: a lost connection ends them in it */
        place = &(*place)->next;
    }
    *place = request;
    return request;
}

/* Takes a request out of the session's list; NULL when it is not there. Lock held. */
static struct request *request_take(struct session *session, unsigned id)
{
    struct request **place = &session->requests;
    while (*place != NULL && (*place)->id != id) {
        place = &(*place)->next;
    }
    struct request *request = *place;
    if (request != NULL) {
        *place = request->next;
    }
    return request;
}

/* Silences a live request and frees it with its queued replies; false when there is none of that id. Lock held. */
bool gewu_request_drop(struct session *session, unsigned id)
{
    struct request *request = request_take(session, id);
    if (request == NULL) {
        return false;
    }
    struct event **place = &session->first_event;
    session->last_event = NULL;
    while (*place != NULL) {
        struct event *event = *place;
        if (event->request == request) {
            *place = event->next;
            event_free(event);
        } else {
            session->last_event = event;
            place = &event->next;
        }
    }
    if (session->running == id) {
        request->is_silent = true;
    } else {
        free(request);
    }
    return true;
}

/* Remembers a request that has ended by itself; the oldest is forgotten. Lock held. */
static void tombstone_add(struct session *session, unsigned id)
{
    if (session->tombstones == NULL) {
        session->tombstones = calloc(GEWU_NUM_TOMBSTONES, sizeof *session->tombstones);
    }
    if (session->tombstones != NULL) {
        session->tombstones[session->next_tombstone++ % GEWU_NUM_TOMBSTONES] = id;
    }
}

/* Whether the request ended by itself and was not aborted since; forgets it. Lock held. */
bool gewu_tombstone_take(struct session *session, unsigned id)
{
    for (unsigned i = 0; session->tombstones != NULL && id != 0 && i < GEWU_NUM_TOMBSTONES; i++) {
        if (session->tombstones[i] == id) {
            session->tombstones[i] = 0;
            return true;
        }
    }
    return false;
}

/*
 * Queues a reply for its callback thread. Takes `json`; a reply to a request that is gone is freed here. False without
 * memory. Lock held.
 */
bool gewu_event_add(unsigned session_id, unsigned request_id, bool is_final, char *json)
{
    struct session *session = sessions;
    struct request *request = NULL;
    while (session != NULL && session->id != session_id) {
        session = session->next;
    }
    for (request = session ? session->requests : NULL; request != NULL && request->id != request_id;) {
        request = request->next;
    }
    if (request == NULL || request->has_end) {
        free(json);
        return true;
    }
    struct event *event = malloc(sizeof *event);
    if (event == NULL) {
        free(json);
        return false;
    }
    *event = (struct event){.request = request, .is_final = is_final, .json = json};
    request->has_end = is_final;
    queue_event(session, event);
    return true;
}

/* Delivers the first queued reply. Lock held, but not while the callback runs. */
static void deliver_event(struct session *session)
{
    struct event *event = session->first_event;
    struct request *request = event->request;
    bool is_final = event->is_final;
    session->first_event = event->next;
    if (session->first_event == NULL) {
        session->last_event = NULL;
    }
    if (is_final) {
        request_take(session, request->id);
        tombstone_add(session, request->id);
    }
    session->running = request->id;
    pthread_mutex_unlock(&gewu_lock);
    request->callback(request->context, event->json);
    pthread_mutex_lock(&gewu_lock);
    session->running = 0;
    pthread_cond_broadcast(&session->is_idle);
    event_free(event);
    if (is_final || request->is_silent) {
        free(request);
    }
}

/* A callback thread: runs until its session is destroyed, or lost and drained. Owns a reference. */
static void *deliver_events(void *argument)
{
    struct session *session = argument;
    own_session = session;
    pthread_mutex_lock(&gewu_lock);
    for (;;) {
        while (session->first_event == NULL && !session->is_closed && !session->is_lost) {
            pthread_cond_wait(&session->has_event, &gewu_lock);
        }
        if (session->first_event == NULL) {
            break;
        }
        deliver_event(session);
    }
    session->has_thread = false;
    remove_from_table(session);
    gewu_session_unref(session);
    pthread_mutex_unlock(&gewu_lock);
    return NULL;
}

/* Starts the session's callback thread unless it runs; false when it cannot. Signals stay with the app. Lock held. */
bool gewu_start_thread(struct session *session)
{
    sigset_t all, before;
    pthread_t thread;
    if (session->has_thread) {
        return true;
    }
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    session->has_thread = pthread_create(&thread, NULL, deliver_events, session) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (session->has_thread) {
        session->refs++;
        pthread_detach(thread);
    }
    return session->has_thread;
}

/* Whether the calling callback is waited for, through any number of sessions, by the callback of `session`. */
static bool would_wait_for_itself(const struct session *session)
{
    while (session != NULL && session != own_session) {
        session = session->waits_for;
    }
    return session != NULL;
}

/*
 * Waits until no callback of the request (0: of any request) of `session` runs. Returns at once inside that callback,
 * or when that callback itself waits for the calling one. The caller holds a reference. Lock held, not while waiting.
 */
void gewu_wait_idle(struct session *session, unsigned request_id)
{
    struct timespec deadline;
    bool has_warned = false;
    if (would_wait_for_itself(session)) {
        return;
    }
    clock_gettime(CLOCK_MONOTONIC, &deadline);
    deadline.tv_sec += WARN_AFTER_S;
    if (own_session != NULL) {
        own_session->waits_for = session;
    }
    while (session->running != 0 && (request_id == 0 || session->running == request_id)) {
        if (has_warned) {
            pthread_cond_wait(&session->is_idle, &gewu_lock);
        } else if (pthread_cond_timedwait(&session->is_idle, &gewu_lock, &deadline) == ETIMEDOUT) {
            has_warned = true;
            fprintf(stderr, "libqos: session %u: waiting for a callback that runs for more than %d s; "
                "a lock held by the caller that it wants would be a deadlock\n", session->id, WARN_AFTER_S);
        }
    }
    if (own_session != NULL) {
        own_session->waits_for = NULL;
    }
}
