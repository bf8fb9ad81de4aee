/*
 * Declarations that the files of libqos.so share. The library is a thin client: it sends calls to the daemon as frames,
 * and delivers replies to callbacks. Each file uses only those listed below it:
 *
 *   api.c         the public functions: order of checks, error codes
 *   service.c     the one connection to the daemon: connecting, hello, the reader thread, loss of the connection; fork
 *   calls.c       calls that wait for an answer, up to a deadline
 *   callbacks.c   the callback threads, one per session
 *   session.c     sessions and their requests
 *   connection.c  a socket, its queue of frames to send, its reference count
 *   socket.c      the daemon's address, connecting, checking the owner of the listening process, one send
 *   wire.c        encoding and decoding frames
 *   model.c       finding and opening the model named in Create's attributes
 *   thread_qos.c  the QoS level of the calling thread
 *   lock.c        the lock, conditions with deadlines, threads
 *   log.c         messages for developers about failed calls
 *
 * One lock, gewu_lock, guards every struct here; "Lock held" in a comment means that the caller must hold it. It is
 * never held while user code runs, while something is logged, or during a system call that can block.
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
 * How long a public call waits for the daemon, connecting included. A running daemon answers in milliseconds, one that
 * systemd starts on the first call within a second; users of an app lose patience after a few seconds.
 */
#ifndef GEWU_PATIENCE_MS
#define GEWU_PATIENCE_MS 5000
#endif

/* The largest handle of each kind, after which numbers start again at 1. Tests set it lower to reach that. */
#ifndef GEWU_MAX_ID
#define GEWU_MAX_ID (OH_QOS_GEWU_INVALID_SESSION_ID - 1)
#endif

enum {
    GEWU_PROTOCOL = 2,            /* version, as in frames.py; each side sends its own in its first frame */
    GEWU_MAX_PAYLOAD = 16 << 20,  /* bytes; longer JSON is refused as INVAL */
    GEWU_HEADER_SIZE = 80,        /* bytes of the longest header, newline included */
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

/* A queued frame of which some or all bytes are still to be sent. */
struct outgoing {
    unsigned call;  /* 0: no caller waits for its answer */
    int passed_fd;  /* descriptor to pass with it, -1 = none; closed once sent */
    size_t length, sent;
    struct outgoing *next;
    char bytes[];
};

/* A socket to the daemon. Freed, and the descriptor closed, with the last reference. */
struct connection {
    int fd;
    unsigned refs;
    bool is_ready;    /* the daemon's hello has come and its protocol version fits */
    bool is_lost;
    bool is_stalled;  /* a call got no answer in time, and nothing has been received since */
    bool is_flushing; /* a thread is sending the queued frames */
    struct outgoing *first_outgoing, *last_outgoing;
    pthread_cond_t changed;  /* signalled when is_ready or is_lost changes */
};

/* A reply that is queued for the callback. */
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
    bool has_end;      /* its final reply is queued; no second one is ever queued */
    bool is_silent;    /* aborted while its callback runs; the callback thread frees it */
    struct event end;  /* the final reply after a lost connection, which then needs no allocation */
    struct request *next;
};

struct session {
    unsigned id;
    unsigned refs;  /* of the table, the callback thread, and each call that uses it */
    struct connection *connection;
    bool is_closed;   /* destroyed; in the table until no callback runs */
    bool is_lost;     /* the connection is lost; queued replies are still delivered */
    bool has_thread;
    struct request *requests;  /* requests that are neither finished nor aborted */
    struct event *first_event, *last_event;
    unsigned running;            /* the request whose callback is running, or 0 */
    struct session *waits_for;   /* the session for whose callback this session's callback waits, or NULL */
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
