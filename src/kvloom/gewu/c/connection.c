/*
 * A socket to the daemon. Sending never blocks a caller: bytes that the socket does not accept at once are queued, and
 * a thread, which exists while the queue is not empty, sends them.
 */
#include "internal.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* A connection over `fd`, which it owns, with one reference for the caller. NULL without memory. */
struct connection *gewu_connection_new(int fd)
{
    struct connection *connection = calloc(1, sizeof *connection);
    if (connection != NULL) {
        connection->fd = fd;
        connection->refs = 1;
        gewu_cond_init(&connection->changed);
    }
    return connection;
}

/* Frees a queued frame, and closes the descriptor that was to be passed with it. Lock held. */
static void outgoing_free(struct outgoing *outgoing)
{
    if (outgoing->passed_fd >= 0) {
        close(outgoing->passed_fd);
    }
    free(outgoing);
}

/* Removes the first queued frame. Lock held. */
static void pop_outgoing(struct connection *connection)
{
    struct outgoing *first = connection->first_outgoing;
    connection->first_outgoing = first->next;
    if (connection->first_outgoing == NULL) {
        connection->last_outgoing = NULL;
    }
    outgoing_free(first);
}

/* Gives up a reference; the last one closes the socket. Lock held. */
void gewu_connection_unref(struct connection *connection)
{
    if (--connection->refs > 0) {
        return;
    }
    while (connection->first_outgoing != NULL) {
        pop_outgoing(connection);
    }
    if (connection->fd >= 0) {
        close(connection->fd);
    }
    pthread_cond_destroy(&connection->changed);
    free(connection);
}

/* Shuts the connection down; its reader thread then wakes every waiting call. */
void gewu_connection_break(struct connection *connection)
{
    shutdown(connection->fd, SHUT_RDWR);
}

/* Sends as much of the queued frames as the socket accepts; false if it accepts no more now. Lock held. */
static bool send_outgoing(struct connection *connection)
{
    while (connection->first_outgoing != NULL) {
        struct outgoing *first = connection->first_outgoing;
        struct iovec pieces[2] = {{first->bytes + first->sent, first->length - first->sent}, {NULL, 0}};
        ptrdiff_t sent = gewu_socket_send(connection->fd, pieces, first->sent == 0 ? first->passed_fd : -1);
        if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            return false;
        }
        if (sent < 0) {  /* lost, as the reader thread sees too */
            first->sent = first->length;
        } else {
            first->sent += (size_t)sent;
        }
        if (first->sent == first->length) {
            pop_outgoing(connection);
        }
    }
    return true;
}

/* The thread that sends queued frames. Owns a reference. Shutting the connection down wakes it. */
static void *flush_outgoing(void *argument)
{
    struct connection *connection = argument;
    pthread_mutex_lock(&gewu_lock);
    while (!send_outgoing(connection)) {
        struct pollfd wanted = {.fd = connection->fd, .events = POLLOUT};
        pthread_mutex_unlock(&gewu_lock);
        poll(&wanted, 1, -1);
        pthread_mutex_lock(&gewu_lock);
    }
    connection->is_flushing = false;
    gewu_connection_unref(connection);
    pthread_mutex_unlock(&gewu_lock);
    return NULL;
}

/* Queues a frame, of which `sent` bytes are sent, with its descriptor. False if out of memory. Lock held. */
static bool keep(struct connection *connection, struct iovec pieces[2], size_t sent, int passed_fd)
{
    size_t length = pieces[0].iov_len + pieces[1].iov_len;
    struct outgoing *outgoing = malloc(sizeof *outgoing + length);
    if (outgoing == NULL) {
        return false;
    }
    *outgoing = (struct outgoing){.passed_fd = passed_fd, .length = length, .sent = sent};
    memcpy(outgoing->bytes, pieces[0].iov_base, pieces[0].iov_len);
    if (pieces[1].iov_len > 0) {
        memcpy(outgoing->bytes + pieces[0].iov_len, pieces[1].iov_base, pieces[1].iov_len);
    }
    if (connection->last_outgoing != NULL) {
        connection->last_outgoing->next = outgoing;
    } else {
        connection->first_outgoing = outgoing;
    }
    connection->last_outgoing = outgoing;
    return true;
}

/* Starts a thread that sends queued frames, unless one runs. False if the system cannot create it. Lock held. */
static bool start_flushing(struct connection *connection)
{
    if (!connection->is_flushing) {
        connection->is_flushing = gewu_start_thread(flush_outgoing, connection);
        connection->refs += connection->is_flushing;
    }
    return connection->is_flushing;
}

/*
 * Sends a frame now, or queues it until the daemon reads; with it goes the descriptor `passed_fd`, unless that is
 * negative; the descriptor is closed. gewu_unsend identifies the frame by `call`. If it can be neither sent nor queued,
 * the connection is shut down. Does not block. Lock held.
 */
void gewu_send(struct connection *connection, const struct frame *frame, unsigned call, int passed_fd)
{
    char header[GEWU_HEADER_SIZE];
    struct iovec pieces[2] = {{header, gewu_write_header(frame, header)}, {(void *)frame->payload, frame->length}};
    size_t length = pieces[0].iov_len + pieces[1].iov_len;
    ptrdiff_t sent = 0;
    if (connection->first_outgoing == NULL) {
        sent = gewu_socket_send(connection->fd, pieces, passed_fd);
        if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK) {
            sent = (ptrdiff_t)length;  /* lost, as the reader thread sees too */
        }
    }
    sent = sent < 0 ? 0 : sent;
    if (sent > 0 && passed_fd >= 0) {
        close(passed_fd);
        passed_fd = -1;
    }
    if ((size_t)sent == length) {
        return;
    }
    if (!keep(connection, pieces, (size_t)sent, passed_fd)) {
        if (passed_fd >= 0) {
            close(passed_fd);
        }
        gewu_connection_break(connection);
        return;
    }
    connection->last_outgoing->call = call;
    if (!start_flushing(connection)) {
        gewu_connection_break(connection);
    }
}

/* Withdraws a call's queued frame of which no byte was sent. False if the daemon may have received some of it. Lock
 * held. */
bool gewu_unsend(struct connection *connection, unsigned call)
{
    struct outgoing **link = &connection->first_outgoing, *before = NULL;
    while (*link != NULL && (*link)->call != call) {
        before = *link;
        link = &before->next;
    }
    struct outgoing *found = *link;
    if (found == NULL || found->sent > 0) {
        return false;
    }
    *link = found->next;
    if (connection->last_outgoing == found) {
        connection->last_outgoing = before;
    }
    outgoing_free(found);
    return true;
}
