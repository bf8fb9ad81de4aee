/* Sessions, their requests, and the replies that wait for their callback. */
#include "internal.h"

#include <stdlib.h>

static const char LOST_REPLY[] = "{\"message\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":\"abort\","
    "\"error\":{\"code\":901,\"message\":\"the connection to the service was lost\"}}";

static struct session *sessions;
static unsigned last_session_id, last_request_id;

/* The session of that handle, or NULL. Lock held. */
static struct session *look_up(unsigned id)
{
    struct session *session = sessions;
    while (session != NULL && session->id != id) {
        session = session->next;
    }
    return session;
}

/* A session on `connection`, with one reference for the caller, not yet in the table. NULL without memory. Lock held.
 * */
struct session *gewu_session_new(struct connection *connection)
{
    struct session *session = calloc(1, sizeof *session);
    if (session == NULL) {
        return NULL;
    }
    do {
        session->id = gewu_next_id(&last_session_id);
    } while (look_up(session->id) != NULL);  /* only after four billion others */
    session->refs = 1;
    session->connection = connection;
    connection->refs++;
    gewu_cond_init(&session->has_event);
    gewu_cond_init(&session->is_idle);
    return session;
}

/* Puts a session into the table, which takes a reference. Lock held. */
void gewu_session_add(struct session *session)
{
    session->refs++;
    session->next = sessions;
    sessions = session;
}

/* Looks up a session and adds a reference for the caller; NULL = there is none. Lock held. */
struct session *gewu_session_find(unsigned id)
{
    struct session *session = look_up(id);
    if (session != NULL) {
        session->refs++;
    }
    return session;
}

/* Drops a reference; the last one frees the session, which has no requests by then. Lock held. */
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

/* Frees a reply that is not queued. */
void gewu_event_free(struct event *event)
{
    if (event != &event->request->end) {
        free(event->json);
        free(event);
    }
}

/* Queues an event for the session's callback thread. Lock held. */
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

/* Removes the session from the table, if it is there, and drops the table's reference. Lock held. */
void gewu_session_remove(struct session *session)
{
    struct session **link = &sessions;
    while (*link != NULL && *link != session) {
        link = &(*link)->next;
    }
    if (*link != NULL) {
        *link = session->next;
        gewu_session_unref(session);
    }
}

/*
 * Closes the session and drops its requests, without callbacks. It stays in the table until its callback thread ends,
 * so that a second Destroy can wait for a callback too. The caller holds a reference. Lock held.
 */
void gewu_session_close(struct session *session)
{
    session->is_closed = true;
    if (!session->has_thread) {
        gewu_session_remove(session);
    }
    while (session->requests != NULL) {
        gewu_request_drop(session, session->requests->id);
    }
    pthread_cond_signal(&session->has_event);
}

/*
 * Ends the requests of a lost connection: each accepted one with one reply "abort"; one whose Submit is not answered
 * yet only with the error that Submit returns. Sessions stay in the table until these replies are delivered, so that
 * Destroy can wait for a callback. Lock held.
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
            gewu_session_remove(session);
        }
    }
}

/* In the child of a fork: drops the parent's sessions. Not freed: threads that do not exist here hold references. */
void gewu_sessions_forget(void)
{
    for (struct session *session = sessions; session != NULL; session = session->next) {
        session->is_closed = true;
        session->first_event = session->last_event = NULL;
    }
    sessions = NULL;
}

/* Whether a request with that id exists in the session, or has ended and is remembered. Lock held. */
static bool knows_request(const struct session *session, unsigned id)
{
    for (const struct request *request = session->requests; request != NULL; request = request->next) {
        if (request->id == id) {
            return true;
        }
    }
    for (unsigned i = 0; session->tombstones != NULL && i < GEWU_NUM_TOMBSTONES; i++) {
        if (session->tombstones[i] == id) {
            return true;
        }
    }
    return false;
}

/*
 * Registers a request; called before it is sent, because its first reply may come before Submit returns. NULL if out of
 * memory. The session owns it until it is dropped or its last reply is delivered. Lock held.
 */
struct request *gewu_request_add(struct session *session, OH_QoS_GewuOnResponse callback, void *context)
{
    struct request *request = calloc(1, sizeof *request);
    struct request **link = &session->requests;
    if (request == NULL) {
        return NULL;
    }
    do {
        request->id = gewu_next_id(&last_request_id);
    } while (knows_request(session, request->id));
    request->callback = callback;
    request->context = context;
    while (*link != NULL) {  /* in order of submission, in which a lost connection ends them */
        link = &(*link)->next;
    }
    *link = request;
    return request;
}

/* Removes a request from the session's list and returns it; NULL if it is not there. Lock held. */
struct request *gewu_request_take(struct session *session, unsigned id)
{
    struct request **link = &session->requests;
    while (*link != NULL && (*link)->id != id) {
        link = &(*link)->next;
    }
    struct request *request = *link;
    if (request != NULL) {
        *link = request->next;
    }
    return request;
}

/* Drops a request: frees it with its queued replies, without callbacks; false if there is none with this id. Lock held.
 * */
bool gewu_request_drop(struct session *session, unsigned id)
{
    struct request *request = gewu_request_take(session, id);
    if (request == NULL) {
        return false;
    }
    struct event **link = &session->first_event;
    session->last_event = NULL;
    while (*link != NULL) {
        struct event *event = *link;
        if (event->request == request) {
            *link = event->next;
            gewu_event_free(event);
        } else {
            session->last_event = event;
            link = &event->next;
        }
    }
    if (session->running == id) {
        request->is_silent = true;
    } else {
        free(request);
    }
    return true;
}

/* Remembers a request that has finished, in place of the oldest one. Lock held. */
void gewu_tombstone_add(struct session *session, unsigned id)
{
    if (session->tombstones == NULL) {
        session->tombstones = calloc(GEWU_NUM_TOMBSTONES, sizeof *session->tombstones);
    }
    if (session->tombstones != NULL) {
        session->tombstones[session->next_tombstone++ % GEWU_NUM_TOMBSTONES] = id;
    }
}

/* Whether the request has finished and is remembered; removes it from memory. Lock held. */
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
 * Queues a reply for its session's callback thread. Takes ownership of `json`, and frees it if the request no longer
 * exists. False if out of memory. Lock held.
 */
bool gewu_event_add(struct connection *connection, const struct frame *frame, char *json)
{
    struct session *session = look_up(frame->a);
    bool is_ours = session != NULL && session->connection == connection;
    struct request *request = is_ours ? session->requests : NULL;
    while (request != NULL && request->id != frame->b) {
        request = request->next;
    }
    struct event *event = request != NULL && !request->has_end ? malloc(sizeof *event) : NULL;
    if (event == NULL) {
        free(json);
        return request == NULL || request->has_end;
    }
    *event = (struct event){.request = request, .is_final = frame->c != 0, .json = json};
    request->has_end = event->is_final;
    queue_event(session, event);
    return true;
}
