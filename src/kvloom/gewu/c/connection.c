/*
 * The socket to the daemon. A reader thread takes frames off it and never runs user code; calls that need an answer
 * wait on a condition of their own. A lost connection fails the calls, ends the requests, and the next Create connects
 * again.
 */
#include "internal.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

enum { HEADER_SIZE = 80, CONNECT_TIMEOUT_S = 2 };

/* Bytes read ahead from the socket. Owned by the reader thread. */
struct source {
    int fd;
    size_t start, end;
    char bytes[16384];
};

pthread_mutex_t gewu_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct connection *current;  /* NULL while not connected; its reader thread keeps it alive */
static struct call *calls;
static unsigned last_call_id;

static void before_fork(void)
{
    pthread_mutex_lock(&gewu_lock);
}

static void after_fork(void)
{
    pthread_mutex_unlock(&gewu_lock);
}

/* The child must not use, nor keep open, the parent's socket: the daemon would not see the parent end. */
static void after_fork_in_child(void)
{
    if (current != NULL) {
        close(current->fd);
    }
    current = NULL;
    calls = NULL;
    gewu_sessions_forget();
    pthread_mutex_init(&gewu_lock, NULL);
}

static void install_fork_handlers(void)
{
    pthread_atfork(before_fork, after_fork, after_fork_in_child);
}

/* Every public call comes through here: takes the lock. */
void gewu_enter(void)
{
    pthread_once(&once, install_fork_handlers);
    pthread_mutex_lock(&gewu_lock);
}

/* The next handle: never 0, never INVALID. Lock held. */
unsigned gewu_next_id(unsigned *counter)
{
    do {
        ++*counter;
    } while (*counter == 0 || *counter == OH_QOS_GEWU_INVALID_SESSION_ID);
    return *counter;
}

/* Gives up a reference; the last one closes the socket. Lock held. */
void gewu_connection_unref(struct connection *connection)
{
    if (--connection->refs == 0) {
        close(connection->fd);
        pthread_mutex_destroy(&connection->writing);
        free(connection);
    }
}

/*
 * Writes a frame, and with it a descriptor unless `passed_fd` is negative. False when the connection is lost. The
 * caller holds a reference on the connection and NOT the lock.
 */
bool gewu_send(struct connection *connection, const struct frame *frame, int passed_fd)
{
    char header[HEADER_SIZE];
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    int length = snprintf(header, sizeof header, "%c %u %u %u %u %zu\n", frame->op, frame->a, frame->b, frame->c,
        frame->d, frame->length);
    struct iovec parts[2] = {{header, (size_t)length}, {(void *)frame->payload, frame->length}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    if (passed_fd >= 0) {
        memset(&control, 0, sizeof control);
        control.align = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET,
            .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(&control.align), &passed_fd, sizeof passed_fd);
        message.msg_control = &control;
        message.msg_controllen = sizeof control.bytes;
    }
    size_t left = parts[0].iov_len + parts[1].iov_len;
    pthread_mutex_lock(&connection->writing);
    while (left > 0) {
        ssize_t sent = sendmsg(connection->fd, &message, MSG_NOSIGNAL);
        if (sent < 0 && errno != EINTR) {
            break;
        }
        size_t count = sent < 0 ? 0 : (size_t)sent;
        left -= count;
        if (count > 0) {
            message.msg_control = NULL;
            message.msg_controllen = 0;
        }
        for (int i = 0; i < 2; i++) {
            size_t taken = count < parts[i].iov_len ? count : parts[i].iov_len;
            parts[i].iov_base = (char *)parts[i].iov_base + taken;
            parts[i].iov_len -= taken;
            count -= taken;
        }
    }
    pthread_mutex_unlock(&connection->writing);
    return left == 0;
}

/* The next byte is at source->bytes[source->start]; false at the end of the connection. */
static bool source_fill(struct source *source)
{
    while (source->start == source->end) {
        ssize_t count = recv(source->fd, source->bytes, sizeof source->bytes, 0);
        if (count == 0 || (count < 0 && errno != EINTR)) {
            return false;
        }
        source->start = 0;
        source->end = count < 0 ? 0 : (size_t)count;
    }
    return true;
}

/* Reads a header and its payload, which the caller frees (NUL-terminated). False when the connection has ended. */
static bool source_frame(struct source *source, struct frame *frame, char **payload)
{
    char header[HEADER_SIZE];
    size_t length = 0;
    do {
        if (length + 1 == sizeof header || !source_fill(source)) {
            return false;
        }
        header[length++] = source->bytes[source->start++];
    } while (header[length - 1] != '\n');
    header[length] = '\0';
    if (sscanf(header, "%c %u %u %u %u %zu", &frame->op, &frame->a, &frame->b, &frame->c, &frame->d, &frame->length) != 6
        || frame->length > GEWU_MAX_PAYLOAD || (*payload = malloc(frame->length + 1)) == NULL) {
        return false;
    }
    for (size_t used = 0, count; used < frame->length; used += count) {
        if (!source_fill(source)) {
            free(*payload);
            return false;
        }
        count = source->end - source->start;
        count = count < frame->length - used ? count : frame->length - used;
        memcpy(*payload + used, source->bytes + source->start, count);
        source->start += count;
    }
    (*payload)[frame->length] = '\0';
    return true;
}

/* Answers a waiting call: with an error code, or (`path` not NULL, taken over) with a path to open. Lock held. */
static void answer_call(unsigned id, unsigned error, char *path)
{
    struct call *call = calls;
    while (call != NULL && call->id != id) {
        call = call->next;
    }
    if (call == NULL || call->is_answered || call->path != NULL) {
        free(path);
        return;
    }
    call->error = error;
    call->path = path;
    call->is_answered = path == NULL;
    pthread_cond_signal(&call->answered);
}

/* Whether the Submit of this request has not been answered. Lock held. */
static bool is_pending(unsigned request)
{
    for (const struct call *call = calls; call != NULL; call = call->next) {
        if (call->request == request && !call->is_answered) {
            return true;
        }
    }
    return false;
}

/* The connection has ended: requests first, while it is still known which calls were unanswered. Lock held. */
static void lose(struct connection *connection)
{
    connection->is_lost = true;
    shutdown(connection->fd, SHUT_RDWR);
    gewu_sessions_lost(connection, is_pending);
    for (struct call *call = calls; call != NULL; call = call->next) {
        if (call->connection == connection && !call->is_answered) {
            call->error = OH_QOS_GEWU_FAULT;
            call->is_answered = true;
            pthread_cond_signal(&call->answered);
        }
    }
    if (current == connection) {
        current = NULL;
    }
}

/* The reader thread. Owns a reference on its connection. */
static void *read_frames(void *argument)
{
    struct connection *connection = argument;
    struct source source = {.fd = connection->fd};
    struct frame frame;
    char *payload;
    bool is_good = true;
    while (is_good && source_frame(&source, &frame, &payload)) {
        pthread_mutex_lock(&gewu_lock);
        if (frame.op == 'e') {
            is_good = gewu_event_add(frame.a, frame.b, frame.c != 0, payload);
        } else if (frame.op == 'o') {
            answer_call(frame.a, 0, payload);
        } else {
            if (frame.b != OH_QOS_GEWU_OK) {
                gewu_log("refused with %u: %s", frame.b, payload);
            }
            answer_call(frame.a, frame.b, NULL);
            free(payload);
        }
        pthread_mutex_unlock(&gewu_lock);
    }
    pthread_mutex_lock(&gewu_lock);
    lose(connection);
    gewu_connection_unref(connection);
    pthread_mutex_unlock(&gewu_lock);
    return NULL;
}

/* Writes the daemon's address; false when it is too long. $GEWU_SOCKET, else the user's, else the system's. */
static bool find_socket(struct sockaddr_un *address)
{
    const char *path = getenv("GEWU_SOCKET"), *runtime = getenv("XDG_RUNTIME_DIR");
    int length;
    address->sun_family = AF_UNIX;
    if (path != NULL && *path != '\0') {
        length = snprintf(address->sun_path, sizeof address->sun_path, "%s", path);
    } else if (runtime != NULL && *runtime != '\0') {
        length = snprintf(address->sun_path, sizeof address->sun_path, "%s/gewu.sock", runtime);
        if (length >= 0 && (size_t)length < sizeof address->sun_path && access(address->sun_path, F_OK) != 0) {
            length = snprintf(address->sun_path, sizeof address->sun_path, "/run/gewu/gewu.sock");
        }
    } else {
        length = snprintf(address->sun_path, sizeof address->sun_path, "/run/gewu/gewu.sock");
    }
    return length >= 0 && (size_t)length < sizeof address->sun_path;
}

/* A connected socket, or -1. Waits at most CONNECT_TIMEOUT_S for a daemon that does not accept. */
static int open_socket(void)
{
    struct sockaddr_un address;
    struct timeval patience = {.tv_sec = CONNECT_TIMEOUT_S}, forever = {0};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return -1;
    }
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (!find_socket(&address)) {
        gewu_log("the socket's path is longer than %zu bytes: set GEWU_SOCKET", sizeof address.sun_path - 1);
        close(fd);
        return -1;
    }
    if (connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        gewu_log("no service answers on %s (%s): start it with `kvloom gewu daemon`", address.sun_path,
            strerror(errno));
        close(fd);
        return -1;
    }
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &forever, sizeof forever);
    return fd;
}

/* The connection, made if need be, with a reference for the caller; NULL when there is no daemon. Lock held. */
struct connection *gewu_connect(void)
{
    sigset_t all, before;
    pthread_t thread;
    if (current != NULL) {
        current->refs++;
        return current;
    }
    struct connection *connection = calloc(1, sizeof *connection);
    if (connection == NULL || (connection->fd = open_socket()) < 0) {
        free(connection);
        return NULL;
    }
    pthread_mutex_init(&connection->writing, NULL);
    connection->refs = 2;  /* the reader, the caller */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&thread, NULL, read_frames, connection);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) {
        connection->refs = 1;
        gewu_connection_unref(connection);
        return NULL;
    }
    pthread_detach(thread);
    current = connection;
    return connection;
}

/* Opens the path the daemon asked about and passes the descriptor, or errno. Called and returns with the lock held. */
static bool pass_path(struct call *call)
{
    char *path = call->path;
    struct frame frame = {.op = 'F', .a = call->id};
    call->path = NULL;  /* before the answer can come */
    pthread_mutex_unlock(&gewu_lock);
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    frame.b = fd < 0 ? (unsigned)errno : 0;
    bool is_sent = gewu_send(call->connection, &frame, fd);
    if (fd >= 0) {
        close(fd);
    }
    free(path);
    pthread_mutex_lock(&gewu_lock);
    return is_sent;
}

/*
 * Sends the frame, whose `a` becomes the call's number, and waits for the answer: an error code, FAULT when the
 * connection is lost. `request` is that of a Submit, else 0. The caller holds a reference on the connection. Called and
 * returns with the lock held.
 */
OH_QoS_GewuErrorCode gewu_call(struct connection *connection, struct frame *frame, unsigned request)
{
    struct call call = {.id = gewu_next_id(&last_call_id), .request = request, .connection = connection};
    struct call **place = &calls;
    if (connection->is_lost) {
        return OH_QOS_GEWU_FAULT;
    }
    frame->a = call.id;
    pthread_cond_init(&call.answered, NULL);
    call.next = calls;
    calls = &call;
    pthread_mutex_unlock(&gewu_lock);
    bool is_sent = gewu_send(connection, frame, -1);
    pthread_mutex_lock(&gewu_lock);
    while (is_sent && !call.is_answered) {
        if (call.path != NULL) {
            is_sent = pass_path(&call);
        } else {
            pthread_cond_wait(&call.answered, &gewu_lock);
        }
    }
    while (*place != &call) {
        place = &(*place)->next;
    }
    *place = call.next;
    pthread_cond_destroy(&call.answered);
    free(call.path);
    return call.is_answered ? (OH_QoS_GewuErrorCode)call.error : OH_QOS_GEWU_FAULT;
}
