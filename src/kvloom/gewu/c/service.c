/*
 * The one connection to the daemon. A reader thread receives its frames; it never runs user code. When the connection
 * is lost, waiting calls fail and requests end; the next Create connects again.
 */
#include "internal.h"

#include <stdlib.h>
#include <unistd.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct connection *current;  /* NULL while there is none; the connecting or the reader thread keeps it alive */

/* Takes the lock during a fork, so that the child gets consistent data. */
static void before_fork(void)
{
    pthread_mutex_lock(&gewu_lock);
}

/* Releases the lock in the parent. */
static void after_fork(void)
{
    pthread_mutex_unlock(&gewu_lock);
}

/* Closes the parent's socket in the child: while it is open there, the daemon does not notice that the parent ends. */
static void after_fork_in_child(void)
{
    if (current != NULL) {
        close(current->fd);
        current->fd = -1;  /* where the fork was made in a callback, its session still refers to this */
    }
    current = NULL;
    gewu_calls_forget();
    gewu_sessions_forget();
    gewu_callbacks_forget();
    pthread_mutex_init(&gewu_lock, NULL);
}

/* Runs once per process. */
static void install_fork_handlers(void)
{
    pthread_atfork(before_fork, after_fork, after_fork_in_child);
}

/* Takes the lock, and installs the fork handlers before. Every public call begins with it. */
void gewu_enter(void)
{
    pthread_once(&once, install_fork_handlers);
    pthread_mutex_lock(&gewu_lock);
}

/* Handles a lost connection: ends requests, then fails calls, as requests depend on which calls wait. Lock held. */
static void lose(struct connection *connection)
{
    connection->is_lost = true;
    gewu_connection_break(connection);
    gewu_sessions_lost(connection, gewu_call_is_pending);
    gewu_calls_lost(connection);
    pthread_cond_broadcast(&connection->changed);
    if (current == connection) {
        current = NULL;
    }
}

/* Reads the daemon's first frame, its hello. If its protocol is another, logs it and returns false. Lock not held. */
static bool read_hello(const struct connection *connection, struct source *source)
{
    struct frame frame;
    char *payload;
    if (!gewu_read_frame(source, &frame, &payload)) {
        pthread_mutex_lock(&gewu_lock);
        bool is_known = connection->is_lost;  /* it was given up here */
        pthread_mutex_unlock(&gewu_lock);
        if (!is_known) {
            gewu_log("the service ended the connection without a hello: it speaks protocol 1, this library %d, or does "
                "not serve this user", GEWU_PROTOCOL);
        }
        return false;
    }
    free(payload);
    if (frame.op == 'H' && frame.a != GEWU_PROTOCOL) {
        gewu_log("the service speaks protocol %u, this library %d: update the older one", frame.a, GEWU_PROTOCOL);
    } else if (frame.op != 'H') {
        gewu_log("what listens there does not speak Gewu's protocol, of which this library has %d", GEWU_PROTOCOL);
    }
    return frame.op == 'H' && frame.a == GEWU_PROTOCOL;
}

/*
 * Handles an answer. It names the session and, for a Submit, the request. If the caller no longer waits, it does not
 * know them, so they are ended. Lock held.
 */
static void take_answer(struct connection *connection, const struct frame *answer)
{
    bool is_awaited = gewu_call_answer(connection, answer->a, answer->b);
    if (!is_awaited && answer->b == OH_QOS_GEWU_OK && answer->c != 0) {
        struct frame undo = {.op = answer->d != 0 ? 'A' : 'D', .b = answer->c, .c = answer->d};
        gewu_send(connection, &undo, 0, -1);
    }
}

/* Handles a frame; takes ownership of `payload`. False if the connection cannot continue. Lock held. */
static bool take_frame(struct connection *connection, const struct frame *frame, char *payload)
{
    connection->is_stalled = false;
    if (frame->op == 'e') {
        return gewu_event_add(connection, frame, payload);
    }
    free(payload);
    if (frame->op == 'r') {
        take_answer(connection, frame);
    }
    return frame->op == 'r';
}

/* The reader thread. Owns a reference on its connection. */
static void *read_frames(void *argument)
{
    struct connection *connection = argument;
    struct source source = {.fd = connection->fd};
    struct frame frame;
    char *payload;
    bool is_good = read_hello(connection, &source);
    pthread_mutex_lock(&gewu_lock);
    connection->is_ready = is_good;
    pthread_cond_broadcast(&connection->changed);
    while (is_good) {
        pthread_mutex_unlock(&gewu_lock);
        is_good = gewu_read_frame(&source, &frame, &payload);
        if (is_good && frame.op == 'r' && frame.b != OH_QOS_GEWU_OK) {
            gewu_log("refused with %u: %s", frame.b, payload);
        }
        pthread_mutex_lock(&gewu_lock);
        is_good = is_good && take_frame(connection, &frame, payload);
    }
    lose(connection);
    gewu_connection_unref(connection);
    pthread_mutex_unlock(&gewu_lock);
    return NULL;
}

/*
 * Connects `connection` to the daemon, exchanges hellos and starts the reader thread. False if that fails or the
 * deadline passes; *error = NOMEM if no thread can be created. Lock held, but released meanwhile.
 */
static bool greet(struct connection *connection, const struct timespec *deadline, OH_QoS_GewuErrorCode *error)
{
    struct frame hello = {.op = 'H', .a = GEWU_PROTOCOL};
    pthread_mutex_unlock(&gewu_lock);
    bool is_connected = gewu_socket_connect(connection->fd, deadline);
    pthread_mutex_lock(&gewu_lock);
    if (!is_connected) {
        return false;
    }
    if (!gewu_start_thread(read_frames, connection)) {
        *error = OH_QOS_GEWU_NOMEM;
        return false;
    }
    connection->refs++;
    gewu_send(connection, &hello, 0, -1);
    while (!connection->is_ready && !connection->is_lost) {
        if (!gewu_wait(&connection->changed, deadline)) {
            pthread_mutex_unlock(&gewu_lock);
            gewu_log("the service has not said hello for %d ms: it is stopped or overloaded", GEWU_PATIENCE_MS);
            pthread_mutex_lock(&gewu_lock);
            return connection->is_ready;
        }
    }
    return connection->is_ready;
}

/* Makes an unconnected connection, with a reference for the caller; NULL if out of descriptors or memory. Lock held. */
static struct connection *begin(void)
{
    int fd = gewu_socket();
    struct connection *connection = fd < 0 ? NULL : gewu_connection_new(fd);
    if (fd >= 0 && connection == NULL) {
        close(fd);
    }
    return connection;
}

/*
 * Returns the connection, which it makes if needed, with a reference for the caller. On failure NULL, and *error =
 * NOSYS if there is no daemon, it does not answer, or its protocol is another; NOMEM. If several threads find no
 * connection, one connects and the others wait for it. Lock held, but released while waiting.
 */
struct connection *gewu_connect(const struct timespec *deadline, OH_QoS_GewuErrorCode *error)
{
    struct connection *connection = current;
    *error = OH_QOS_GEWU_NOSYS;
    if (connection == NULL) {
        connection = current = begin();
        if (connection == NULL) {
            *error = OH_QOS_GEWU_NOMEM;
            return NULL;
        }
        if (!greet(connection, deadline, error)) {
            lose(connection);
        }
    } else {
        connection->refs++;
        while (!connection->is_ready && !connection->is_lost && gewu_wait(&connection->changed, deadline)) {
        }
    }
    if (connection->is_lost || !connection->is_ready) {
        gewu_connection_unref(connection);
        return NULL;
    }
    return connection;
}
