/* The public functions. They check arguments in the order that docs/gewu.md gives; the daemon checks the JSON. */
#include "internal.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

/* Returned by Create when there is no session. */
static OH_QoS_GewuCreateSessionResult create_failed(OH_QoS_GewuErrorCode error)
{
    return (OH_QoS_GewuCreateSessionResult){OH_QOS_GEWU_INVALID_SESSION_ID, error};
}

/* Returned by Submit when there is no request. */
static OH_QoS_GewuSubmitRequestResult submit_failed(OH_QoS_GewuErrorCode error)
{
    return (OH_QoS_GewuSubmitRequestResult){OH_QOS_GEWU_INVALID_REQUEST_ID, error};
}

/* Closes a descriptor unless it is negative. */
static void close_if_open(int fd)
{
    if (fd >= 0) {
        close(fd);
    }
}

/*
 * Asks the daemon for a session on a model. model_fd: the open model, closed here; -1 = it could not be opened, and the
 * daemon reports why. Lock held.
 */
static OH_QoS_GewuCreateSessionResult ask_for_session(
    struct connection *connection, struct frame *frame, int model_fd, const struct timespec *deadline)
{
    struct session *session = gewu_session_new(connection);
    if (session == NULL) {
        close_if_open(model_fd);
        return create_failed(OH_QOS_GEWU_NOMEM);
    }
    frame->b = session->id;
    OH_QoS_GewuCreateSessionResult result = create_failed(gewu_call(connection, frame, model_fd, deadline));
    if (connection->is_lost) {
        result.error = OH_QOS_GEWU_NOSYS;
    } else if (result.error == OH_QOS_GEWU_OK) {
        result.session = session->id;
        gewu_session_add(session);
    }
    gewu_session_unref(session);
    return result;
}

/*
 * Tries once to create a session; *is_lost = whether the connection was lost meanwhile. It opens the model before it
 * takes the lock, because a file system may be slow.
 */
static OH_QoS_GewuCreateSessionResult create(const char *attributes, const struct timespec *deadline, bool *is_lost)
{
    OH_QoS_GewuCreateSessionResult result = create_failed(OH_QOS_GEWU_NOMEM);
    struct frame frame = {.op = 'C', .d = gewu_thread_qos(), .payload = attributes, .length = strlen(attributes)};
    int error, model_fd = gewu_open_model(attributes, &error);
    *is_lost = false;
    if (error == EMFILE || error == ENFILE || error == ENOMEM) {  /* a fault of the app, not of the model */
        gewu_log("the model could not be opened: the app is out of descriptors or memory");
        return result;
    }
    frame.c = (unsigned)error;
    gewu_enter();
    struct connection *connection = gewu_connect(deadline, &result.error);
    if (connection != NULL) {
        result = ask_for_session(connection, &frame, model_fd, deadline);
        *is_lost = connection->is_lost;
        gewu_connection_unref(connection);
    } else {
        close_if_open(model_fd);
    }
    pthread_mutex_unlock(&gewu_lock);
    return result;
}

/* Tries again once if the connection was lost: the daemon may have been restarted since the last call. */
OH_QoS_GewuCreateSessionResult OH_QoS_GewuCreateSession(const char *attributes)
{
    OH_QoS_GewuCreateSessionResult result = create_failed(OH_QOS_GEWU_FAULT);
    struct timespec deadline = gewu_deadline(GEWU_PATIENCE_MS);
    bool is_lost = true;
    if (attributes == NULL) {
        return result;
    }
    if (strlen(attributes) > GEWU_MAX_PAYLOAD) {
        return create_failed(OH_QOS_GEWU_INVAL);
    }
    for (int i = 0; i < 2 && is_lost; i++) {
        result = create(attributes, &deadline, &is_lost);
    }
    return result;
}

/*
 * Sends Destroy to the daemon and waits for the answer. The daemon stops the requests before it answers, so the engine
 * is idle while Destroy waits for a running callback. If the connection is stalled, it does not wait: the daemon
 * handles the message when it can, and an app with a thousand sessions must not wait a thousand times. Lock held.
 */
static void tell_destroyed(struct session *session)
{
    struct timespec deadline = gewu_deadline(GEWU_PATIENCE_MS);
    struct frame frame = {.op = 'D', .b = session->id};
    if (session->connection->is_stalled) {
        gewu_send(session->connection, &frame, 0, -1);
    } else {
        gewu_call(session->connection, &frame, -1, &deadline);
    }
}

/* Ends the session in this process, whatever the daemon answers. */
OH_QoS_GewuErrorCode OH_QoS_GewuDestroySession(OH_QoS_GewuSession id)
{
    OH_QoS_GewuErrorCode error = OH_QOS_GEWU_NOENT;
    gewu_enter();
    struct session *session = gewu_session_find(id);
    if (session != NULL) {
        if (!session->is_closed) {
            gewu_session_close(session);
            if (!session->is_lost) {
                tell_destroyed(session);
                error = OH_QOS_GEWU_OK;
            }
        }
        gewu_wait_idle(session, 0);
        gewu_session_unref(session);
    }
    pthread_mutex_unlock(&gewu_lock);
    return error;
}

/* Sends a registered request; unregisters it if it is refused or not answered in time. Lock held. */
static OH_QoS_GewuErrorCode submit(struct session *session, const char *json, size_t length, unsigned id)
{
    struct timespec deadline = gewu_deadline(GEWU_PATIENCE_MS);
    struct frame frame = {.op = 'S', .b = session->id, .c = id, .d = gewu_thread_qos(), .payload = json,
        .length = length};
    OH_QoS_GewuErrorCode error = gewu_call(session->connection, &frame, -1, &deadline);
    if (error != OH_QOS_GEWU_OK) {
        gewu_request_drop(session, id);
        gewu_wait_idle(session, id);
    }
    return error;
}

/* The first reply may come before this returns. */
OH_QoS_GewuSubmitRequestResult OH_QoS_GewuSubmitRequest(OH_QoS_GewuSession session_id, const char *json,
    OH_QoS_GewuOnResponse callback, void *context)
{
    OH_QoS_GewuSubmitRequestResult result = submit_failed(OH_QOS_GEWU_NOENT);
    if (json == NULL) {
        return submit_failed(OH_QOS_GEWU_FAULT);
    }
    size_t length = strlen(json);
    gewu_enter();
    struct session *session = gewu_session_find(session_id);
    if (session == NULL || session->is_lost || session->is_closed) {
        result.error = OH_QOS_GEWU_NOENT;
    } else if (callback == NULL || length > GEWU_MAX_PAYLOAD) {
        result.error = OH_QOS_GEWU_INVAL;
    } else if (!gewu_start_callbacks(session)) {
        result.error = OH_QOS_GEWU_NOMEM;
    } else {
        struct request *request = gewu_request_add(session, callback, context);
        unsigned id = request != NULL ? request->id : 0;  /* `request` may be freed before the answer comes */
        result.error = request != NULL ? submit(session, json, length, id) : OH_QOS_GEWU_NOMEM;
        if (result.error == OH_QOS_GEWU_OK) {
            result.request = id;
        }
    }
    if (session != NULL) {
        gewu_session_unref(session);
    }
    pthread_mutex_unlock(&gewu_lock);
    return result;
}

/* Does not wait for the daemon: no further callback of the request begins, and the daemon stops it when it reads the
 * frame. */
OH_QoS_GewuErrorCode OH_QoS_GewuAbortRequest(OH_QoS_GewuSession session_id, OH_QoS_GewuRequest id)
{
    OH_QoS_GewuErrorCode error = OH_QOS_GEWU_NOENT;
    gewu_enter();
    struct session *session = gewu_session_find(session_id);
    if (session != NULL) {
        bool is_live = gewu_request_drop(session, id);
        if (is_live && !session->is_lost) {
            struct frame frame = {.op = 'A', .b = session_id, .c = id};
            gewu_send(session->connection, &frame, 0, -1);
        }
        bool has_ended = !is_live && gewu_tombstone_take(session, id);
        if ((is_live || has_ended) && !session->is_lost && !session->is_closed) {
            error = OH_QOS_GEWU_OK;
        }
        if (id != 0) {
            gewu_wait_idle(session, id);
        }
        gewu_session_unref(session);
    }
    pthread_mutex_unlock(&gewu_lock);
    return error;
}

/* The names by which the platform's own libqos.so looks up its back end. */
OH_QoS_GewuCreateSessionResult GewuCreateSession(const char *attributes)
    __attribute__((alias("OH_QoS_GewuCreateSession")));
OH_QoS_GewuErrorCode GewuDestroySession(OH_QoS_GewuSession id) __attribute__((alias("OH_QoS_GewuDestroySession")));
OH_QoS_GewuSubmitRequestResult GewuSubmitRequest(OH_QoS_GewuSession session_id, const char *json,
    OH_QoS_GewuOnResponse callback, void *context) __attribute__((alias("OH_QoS_GewuSubmitRequest")));
OH_QoS_GewuErrorCode GewuAbortRequest(OH_QoS_GewuSession session_id, OH_QoS_GewuRequest id)
    __attribute__((alias("OH_QoS_GewuAbortRequest")));
