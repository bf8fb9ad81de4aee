/*
 * What the files of libqos.so share. The library is a thin client: it frames calls to the daemon, and delivers replies.
 *
 *   api.c         the public functions: order of checks, error codes
 *   session.c     sessions, requests, and one callback thread a session
 *   connection.c  the socket: connect, send, the reader thread, calls that wait for an answer
 *   thread_qos.c  the level of the calling thread
 *
 * One lock, gewu_lock, guards every struct here; functions say when they want it held. It is never held while user code
 * runs or while the socket is written. `connection.writing` is the only other lock and is taken last.
 */
#ifndef GEWU_INTERNAL_H
#define GEWU_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

#include "qos/qos.h"

enum {
    GEWU_PROTOCOL = 1,
    GEWU_MAX_PAYLOAD = 16 << 20,  /* bytes; longer JSON is refused as INVAL */
    GEWU_NUM_TOMBSTONES = 1024    /* finished requests a session remembers, so that Abort can still say OK */
};

/* A socket to the daemon. Freed, and the descriptor closed, with the last reference. */
struct connection {
    int fd;
    unsigned refs;
    bool is_lost;
    pthread_mutex_t writing;
};

/* A message: a header line "op a b c d length" and `length` bytes. docs/gewu.md lists the operations. */
struct frame {
    char op;
    unsigned a, b, c, d;
    const char *payload;
    size_t length;
};

/* A call that waits for the daemon's answer; lives on the caller's stack while it is in the list of calls. */
struct call {
    unsigned id;
    unsigned request;  /* of a Submit, else 0 */
    struct connection *connection;
    bool is_answered;
    unsigned error;
    char *path;  /* the daemon asks for this path to be opened; malloc'ed */
    pthread_cond_t answered;
    struct call *next;
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
    bool is_lost;     /* the connection is; what is queued is still delivered */
    bool has_thread;
    struct request *requests;  /* not finished, not aborted */
    struct event *first_event, *last_event;
    unsigned running;            /* the request whose callback runs now, or 0 */
    struct session *waits_for;   /* set while this session's callback waits for another session's */
    unsigned *tombstones;        /* ring of GEWU_NUM_TOMBSTONES ids, 0 = none; NULL until a request finishes */
    unsigned next_tombstone;
    pthread_cond_t has_event, is_idle;
    struct session *next;
};

extern pthread_mutex_t gewu_lock;

void gewu_log(const char *format, ...) __attribute__((format(printf, 1, 2)));
void gewu_enter(void);
unsigned gewu_thread_qos(void);
unsigned gewu_next_id(unsigned *counter);

struct connection *gewu_connect(void);
void gewu_connection_unref(struct connection *connection);
bool gewu_send(struct connection *connection, const struct frame *frame, int passed_fd);
OH_QoS_GewuErrorCode gewu_call(struct connection *connection, struct frame *frame, unsigned request);

struct session *gewu_session_new(struct connection *connection);
void gewu_session_add(struct session *session);
struct session *gewu_session_find(unsigned id);
void gewu_session_close(struct session *session);
void gewu_session_unref(struct session *session);
void gewu_sessions_lost(struct connection *connection, bool (*is_pending)(unsigned request));
void gewu_sessions_forget(void);

bool gewu_start_thread(struct session *session);
struct request *gewu_request_add(struct session *session, OH_QoS_GewuOnResponse callback, void *context);
bool gewu_request_drop(struct session *session, unsigned id);
bool gewu_tombstone_take(struct session *session, unsigned id);
bool gewu_event_add(unsigned session_id, unsigned request_id, bool is_final, char *json);
void gewu_wait_idle(struct session *session, unsigned request_id);

#endif
