/*
 * The callback threads: one per session, started with its first request. Callbacks of a session run one after another;
 * those of different sessions do not wait for each other.
 */
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>

enum { WARN_AFTER_MS = 1000 };

static _Thread_local struct session *own_session;  /* in a callback thread, its session; else NULL */

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
        gewu_request_take(session, request->id);
        gewu_tombstone_add(session, request->id);
    }
    session->running = request->id;
    pthread_mutex_unlock(&gewu_lock);
    request->callback(request->context, event->json);
    pthread_mutex_lock(&gewu_lock);
    session->running = 0;
    pthread_cond_broadcast(&session->is_idle);
    gewu_event_free(event);
    if (is_final || request->is_silent) {
        free(request);
    }
}

/* A callback thread: runs until its session is destroyed, or lost with all replies delivered. Owns a reference. */
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
    gewu_session_remove(session);
    gewu_session_unref(session);
    pthread_mutex_unlock(&gewu_lock);
    return NULL;
}

/* Starts the session's callback thread unless it runs; false if the system cannot create a thread. Lock held. */
bool gewu_start_callbacks(struct session *session)
{
    if (!session->has_thread) {
        session->has_thread = gewu_start_thread(deliver_events, session);
        session->refs += session->has_thread;
    }
    return session->has_thread;
}

/* In the child of a fork: no callback runs in this process, even if the fork was called from one. */
void gewu_callbacks_forget(void)
{
    own_session = NULL;
}

/* Whether waiting for the callback of `session` would deadlock: it waits, directly or through others, for the caller's.
 * */
static bool would_wait_for_itself(const struct session *session)
{
    while (session != NULL && session != own_session) {
        session = session->waits_for;
    }
    return session != NULL;
}

/*
 * Waits until no callback of the request (0 = of any request) of `session` runs. Returns at once if called from that
 * callback, or if that callback waits for the calling one. The caller holds a reference. Lock held, but released while
 * waiting.
 */
void gewu_wait_idle(struct session *session, unsigned request_id)
{
    bool has_warned = false;
    if (would_wait_for_itself(session)) {
        return;
    }
    struct timespec deadline = gewu_deadline(WARN_AFTER_MS);
    if (own_session != NULL) {
        own_session->waits_for = session;
    }
    while (session->running != 0 && (request_id == 0 || session->running == request_id)) {
        if (has_warned) {
            pthread_cond_wait(&session->is_idle, &gewu_lock);
        } else if (!gewu_wait(&session->is_idle, &deadline)) {
            has_warned = true;
            pthread_mutex_unlock(&gewu_lock);
            fprintf(stderr, "libqos: session %u: waiting for a callback that runs for more than %d s; "
                "a lock held by the caller that it wants would be a deadlock\n", session->id, WARN_AFTER_MS / 1000);
            pthread_mutex_lock(&gewu_lock);
        }
    }
    if (own_session != NULL) {
        own_session->waits_for = NULL;
    }
}
