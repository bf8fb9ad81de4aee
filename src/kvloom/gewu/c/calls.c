/*
 * Calls that wait for the daemon's answer, at most until the caller's deadline: a daemon that is stopped, or that sends
 * half a frame, must not block the app.
 */
#include "internal.h"

/* A waiting call. It is on its caller's stack while it is in the list. */
struct call {
    unsigned id;
    unsigned request;  /* the request of a Submit, else 0 */
    struct connection *connection;
    bool is_answered;
    unsigned error;
    pthread_cond_t answered;
    struct call *next;
};

static struct call *calls;
static unsigned last_call_id;

/* The call with this number if it still waits, else NULL. Lock held. */
static struct call *look_up(unsigned id)
{
    struct call *call = calls;
    while (call != NULL && (call->id != id || call->is_answered)) {
        call = call->next;
    }
    return call;
}

/* Takes a call out of the list. Lock held. */
static void remove_call(struct call *call)
{
    struct call **link = &calls;
    while (*link != call) {
        link = &(*link)->next;
    }
    *link = call->next;
    pthread_cond_destroy(&call->answered);
}

/* Wakes the caller with an error code. Lock held. */
static void answer(struct call *call, unsigned error)
{
    call->error = error;
    call->is_answered = true;
    pthread_cond_signal(&call->answered);
}

/* Answers a call of the connection; false if its caller no longer waits. Lock held. */
bool gewu_call_answer(const struct connection *connection, unsigned id, unsigned error)
{
    struct call *call = look_up(id);
    if (call == NULL || call->connection != connection) {
        return false;
    }
    answer(call, error);
    return true;
}

/* Whether the Submit of this request has not been answered. Lock held. */
bool gewu_call_is_pending(unsigned request)
{
    for (const struct call *call = calls; call != NULL; call = call->next) {
        if (call->request == request && !call->is_answered) {
            return true;
        }
    }
    return false;
}

/* Ends the connection's calls with FAULT. Lock held. */
void gewu_calls_lost(const struct connection *connection)
{
    for (struct call *call = calls; call != NULL; call = call->next) {
        if (call->connection == connection && !call->is_answered) {
            answer(call, OH_QOS_GEWU_FAULT);
        }
    }
}

/* In the child of a fork: drops the calls, whose threads do not exist in this process. */
void gewu_calls_forget(void)
{
    calls = NULL;
}

/*
 * Sends the frame, after setting its `a` to the call's number, and with it the descriptor `passed_fd`, unless that is
 * negative; the descriptor is closed. Waits for the answer and returns its error code; FAULT if the connection is lost,
 * NOSYS if the deadline passes. A frame of which nothing was sent by then is withdrawn, except a Destroy. The caller
 * holds a reference to the connection. Lock held, but released while waiting.
 */
OH_QoS_GewuErrorCode gewu_call(
    struct connection *connection, struct frame *frame, int passed_fd, const struct timespec *deadline)
{
    struct call call = {.request = frame->op == 'S' ? frame->c : 0, .connection = connection};
    do {
        call.id = gewu_next_id(&last_call_id);
    } while (look_up(call.id) != NULL);
    gewu_cond_init(&call.answered);
    call.next = calls;
    calls = &call;
    frame->a = call.id;
    gewu_send(connection, frame, call.id, passed_fd);
    while (!call.is_answered && gewu_wait(&call.answered, deadline)) {
    }
    remove_call(&call);
    if (call.is_answered) {
        return (OH_QoS_GewuErrorCode)call.error;
    }
    connection->is_stalled = true;
    if (frame->op != 'D') {
        gewu_unsend(connection, call.id);
    }
    pthread_mutex_unlock(&gewu_lock);
    gewu_log("the service has not answered for %d ms: it is stopped or overloaded", GEWU_PATIENCE_MS);
    pthread_mutex_lock(&gewu_lock);
    return OH_QOS_GEWU_NOSYS;
}
