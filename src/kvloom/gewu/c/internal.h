/*
 * What the files of libqos.so share. The library is a thin client: it frames calls to the daemon, and delivers replies.
 * Each file uses only those below it:
 *
 *   api.c         the public functions: order of checks, error codes
 *   service.c     the one connection to the daemon: connect, hello, the reader thread, the end of it; fork
 *   calls.c       calls that wait for an answer, up to a deadline
 *   callbacks.c   the callback threads, one a session
 *   session.c     sessions and their requests
 *   connection.c  a socket, what could not be sent at once, references
 *   socket.c      where the daemon listens, connecting, who listens there, one send
 *   wire.c        frames as bytes
 *   model.c       the path in a Create's attributes
 *   thread_qos.c  the level of the calling thread
 *   lock.c        the lock, conditions with deadlines, threads
 *   log.c         why calls fail, for people
 *
 * One lock, gewu_lock, guards every struct here; functions say when they want it held. It is never held while user code
 * runs, while something is logged, or over a system call that can wait.
 */
#ifndef GEWU_INTERNAL_H
#define GEWU_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/uio.h>
#include <time.h>

#include "qos/qos.h"

/*
 * How long a public call waits for the daemon, connecting included. A daemon that works answers in milliseconds, one
 * that systemd starts at the first call within a second; an app's user gives up after some seconds.
 */
#ifndef GEWU_PATIENCE_MS
#define GEWU_PATIENCE_MS 5000
#endif

/* The last handle of each kind, after which they begin again with 1. Tests set it, to see that. */
#ifndef GEWU_MAX_ID
#define GEWU_MAX_ID (OH_QOS_GEWU_INVALID_SESSION_ID - 1)
#endif

enum {
    GEWU_PROTOCOL = 2,            /* as in frames.py; both sides send theirs first */
    GEWU_MAX_PAYLOAD = 16 << 20,  /* bytes; longer JSON is refused as INVAL */
    GEWU_HEADER_SIZE = 80,        /* bytes, the newline counted */
    GEWU_NUM_TOMBSTONES = 1024    /* finished requests a session remembers, so that Abort can still say OK */
};

/* A message: a header line "op a b c d length" and `length` bytes. frames.py lists the operations. */
struct frame {
    char op;
    unsigned a, b, c, d;
    const char *payload;
    size_t length;
};

/* Bytes read ahead from the socket. Owned by the reader thread. */
struct source {
    int fd;
    size_t start, end;
    char bytes[16384];
};

/* A frame, or the rest of one, that was not sent yet. */
struct outgoing {
    unsigned call;  /* 0: no caller waits for its answer */
    int passed_fd;  /* or -1; closed when it is sent */
    size_t length, sent;
    struct outgoing *next;
    char bytes[];
};

/* A socket to the daemon. Freed, and the descriptor closed, with the last reference. */
struct connection {
    int fd;
    unsigned refs;
    bool is_ready;    /* both sides speak the same protocol */
    bool is_lost;
    bool is_stalled;  /* a call got no answer in time, and nothing has come in since */
    bool is_flushing; /* a thread sends the outgoing frames */
    struct outgoing *first_outgoing, *last_outgoing;
    pthread_cond_t changed;  /* is_ready or is_lost */
};

/* A reply on its way to the callback. */
struct event {
    struct request *request;
    bool is_final;
    char *json;  /* malloc'ed, except in `request.end` */
    struct event *next;
};

struct request {
    unsigned id;
    OH_QoS_GewuOnResponse callback;
    void *context;
    bool has_end;      /* its final reply is queued: there is never a second one */
    bool is_silent;    /* aborted while its callback runs; the callback thread frees it */
    struct event end;  /* for a lost connection: needs no memory then */
    struct request *next;
};

struct session {
    unsigned id;
    unsigned refs;  /* the table, the callback thread, each call at work on it */
    struct connection *connection;
    bool is_closed;   /* destroyed */
    bool is_lost;     /* the connection is lost; queued replies are still delivered */
    bool has_thread;
    struct request *requests;  /* not finished, not aborted */
    struct event *first_event, *last_event;
    unsigned running;            /* the request whose callback is running, or 0 */
    struct session *waits_for;   /* set while this session's callback waits for another session's */
    unsigned *tombstones;        /* ring of GEWU_NUM_TOMBSTONES ids, 0 = none; NULL until a request finishes */
    unsigned next_tombstone;
    pthread_cond_t has_event, is_idle;
    struct session *next;
};

/* log.c */
void gewu_log(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* lock.c */
extern pthread_mutex_t gewu_lock;
unsigned gewu_next_id(unsigned *counter);
void gewu_cond_init(pthread_cond_t *condition);
struct timespec gewu_deadline(unsigned delay_ms);
struct timespec gewu_time_left(const struct timespec *deadline);
bool gewu_wait(pthread_cond_t *condition, const struct timespec *deadline);
bool gewu_start_thread(void *(*run)(void *argument), void *argument);

/* thread_qos.c */
unsigned gewu_thread_qos(void);

/* model.c */
int gewu_open_model(const char *attributes, int *error);

/* wire.c */
size_t gewu_write_header(const struct frame *frame, char header[GEWU_HEADER_SIZE]);
bool gewu_read_frame(struct source *source, struct frame *frame, char **payload);

/* socket.c */
int gewu_socket(void);
bool gewu_socket_connect(int fd, const struct timespec *deadline);
ptrdiff_t gewu_socket_send(int fd, struct iovec pieces[2], int passed_fd);

/* connection.c */
struct connection *gewu_connection_new(int fd);
void gewu_connection_unref(struct connection *connection);
void gewu_connection_break(struct connection *connection);
void gewu_send(struct connection *connection, const struct frame *frame, unsigned call, int passed_fd);
bool gewu_unsend(struct connection *connection, unsigned call);

/* session.c */
struct session *gewu_session_new(struct connection *connection);
void gewu_session_add(struct session *session);
struct session *gewu_session_find(unsigned id);
void gewu_session_remove(struct session *session);
void gewu_session_close(struct session *session);
void gewu_session_unref(struct session *session);
void gewu_sessions_lost(struct connection *connection, bool (*is_pending)(unsigned request));
void gewu_sessions_forget(void);
struct request *gewu_request_add(struct session *session, OH_QoS_GewuOnResponse callback, void *context);
struct request *gewu_request_take(struct session *session, unsigned id);
bool gewu_request_drop(struct session *session, unsigned id);
void gewu_tombstone_add(struct session *session, unsigned id);
bool gewu_tombstone_take(struct session *session, unsigned id);
bool gewu_event_add(struct connection *connection, const struct frame *frame, char *json);
void gewu_event_free(struct event *event);

/* callbacks.c */
bool gewu_start_callbacks(struct session *session);
void gewu_wait_idle(struct session *session, unsigned request_id);
void gewu_callbacks_forget(void);

/* calls.c */
OH_QoS_GewuErrorCode gewu_call(
    struct connection *connection, struct frame *frame, int passed_fd, const struct timespec *deadline);
bool gewu_call_answer(const struct connection *connection, unsigned id, unsigned error);
bool gewu_call_is_pending(unsigned request);
void gewu_calls_lost(const struct connection *connection);
void gewu_calls_forget(void);

/* service.c */
void gewu_enter(void);
struct connection *gewu_connect(const struct timespec *deadline, OH_QoS_GewuErrorCode *error);

#endif
