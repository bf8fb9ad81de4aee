/* The public functions: what is checked here is checked in the order that docs/gewu.md gives; the daemon checks JSON. */
#include "internal.h"

#include <string.h>

static OH_QoS_GewuCreateSessionResult create_failed(OH_QoS_GewuErrorCode error)
{
    return (OH_QoS_GewuCreateSessionResult){OH_QOS_GEWU_INVALID_SESSION_ID, error};
}

static OH_QoS_GewuSubmitRequestResult submit_failed(OH_QoS_GewuErrorCode error)
{
    return (OH_QoS_GewuSubmitRequestResult){OH_QOS_GEWU_INVALID_REQUEST_ID, error};
}

/* One try to create a session; `is_lost` says that the connection broke under it. Lock held. */
static OH_QoS_GewuCreateSessionResult create(const char *attributes, size_t length, bool *is_lost)
{
    OH_QoS_GewuCreateSessionResult result = create_failed(OH_QOS_GEWU_NOMEM);
    struct connection *connection = gewu_connect();
    *is_lost = false;
    if (connection == NULL) {
        return create_failed(OH_QOS_GEWU_NOSYS);
    }
    struct session *session = gewu_session_new(connection);
    if (session != NULL) {
        struct frame frame = {.op = 'C', .b = session->id, .d = gewu_thread_qos(), .payload = attributes,
            .length = length};
        result = create_failed(gewu_call(connection, &frame, 0));
        *is_lost = connection->is_lost;
        if (result.error == OH_QOS_GEWU_OK && *is_lost) {
            result.error = OH_QOS_GEWU_FAULT;
        } else if (result.error == OH_QOS_GEWU_OK) {
            result.session = session->id;
            gewu_session_add(session);
        }
        gewu_session_unref(session);
    }
    gewu_connection_unref(connection);
    return result;
}

/* A broken connection is tried once more: the daemon may have been replaced since the last call. */
OH_QoS_GewuCreateSessionResult OH_QoS_GewuCreateSession(const char *attributes)
{
    OH_QoS_GewuCreateSessionResult result = create_failed(OH_QOS_GEWU_FAULT);
    bool is_lost = true;
    if (attributes == NULL) {
        return result;
    }
    size_t length = strlen(attributes);
    if (length > GEWU_MAX_PAYLOAD) {
        return create_failed(OH_QOS_GEWU_INVAL);
    }
    gewu_enter();
    for (int i = 0; i < 2 && is_lost; i++) {
        result = create(attributes, length, &is_lost);
    }
    pthread_mutex_unlock(&gewu_lock);
    return result;
}

/* The daemon stops the requests first, so that the engine is idle while this waits for a running callback. */
OH_QoS_GewuErrorCode OH_QoS_GewuDestroySession(OH_QoS_GewuSession id)
{
    OH_QoS_GewuErrorCode error = OH_QOS_GEWU_NOENT;
    gewu_enter();
    struct session *session = gewu_session_find(id);
    if (session != NULL) {
        gewu_session_close(session);
        if (!session->is_lost) {
            struct frame frame = {.op = 'D', .b = id};
            gewu_call(session->connection, &frame, 0);
            error = OH_QOS_GEWU_OK;
        }
        gewu_wait_idle(session, 0);
        gewu_session_unref(session);
    }
    pthread_mutex_unlock(&gewu_lock);
    return error;
}

/* Sends a registered request; takes it back when it is refused. Lock held. */
static OH_QoS_GewuErrorCode submit(struct session *session, const char *json, size_t length, unsigned id)
{
    struct frame frame = {.op = 'S', .b = session->id, .c = id, .d = gewu_thread_qos(), .payload = json,
        .length = length};
    OH_QoS_GewuErrorCode error = gewu_call(session->connection, &frame, id);
    if (error != OH_QOS_GEWU_OK) {
        gewu_request_drop(session, id);
    }
    return error;
}

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
    if (session == NULL || session->is_lost) {
        result.error = OH_QOS_GEWU_NOENT;
    } else if (callback == NULL || length > GEWU_MAX_PAYLOAD) {
        result.error = OH_QOS_GEWU_INVAL;
    } else if (!gewu_start_thread(session)) {
        result.error = OH_QOS_GEWU_NOMEM;
    } else {
        struct request *request = gewu_request_add(session, callback, context);
        unsigned id = request != NULL ? request->id : 0;  /* the request itself may be gone before the answer */
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

/* Needs no answer: the request is silenced here, and the daemon stops it when it reads the frame. */
OH_QoS_GewuErrorCode OH_QoS_GewuAbortRequest(OH_QoS_GewuSession session_id, OH_QoS_GewuRequest id)
{
    OH_QoS_GewuErrorCode error = OH_QOS_GEWU_NOENT;
    gewu_enter();
    struct session *session = gewu_session_find(session_id);
    if (session != NULL) {
        bool is_live = gewu_request_drop(session, id);
        if (is_live && !session->is_lost) {
            struct frame frame = {.op = 'A', .b = session_id, .c = id};
            pthread_mutex_unlock(&gewu_lock);
            gewu_send(session->connection, &frame, -1);
            pthread_mutex_lock(&gewu_lock);
        }
        bool has_ended = !is_live && gewu_tombstone_take(session, id);
        if ((is_live || has_ended) && !session->is_lost) {
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

/* The names under which the platform's own libqos.so looks for its back end. */
OH_QoS_GewuCreateSessionResult GewuCreateSession(const char *attributes)
    __attribute__((alias("OH_QoS_GewuCreateSession")));
OH_QoS_GewuErrorCode GewuDestroySession(OH_QoS_GewuSession id) __attribute__((alias("OH_QoS_GewuDestroySession")));
OH_QoS_GewuSubmitRequestResult GewuSubmitRequest(OH_QoS_GewuSession session_id, const char *json,
    OH_QoS_GewuOnResponse callback, void *context) __attribute__((alias("OH_QoS_GewuSubmitRequest")));
OH_QoS_GewuErrorCode GewuAbortRequest(OH_QoS_GewuSession session_id, OH_QoS_GewuRequest id)
    __attribute__((alias("OH_QoS_GewuAbortRequest")));
