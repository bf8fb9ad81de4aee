/*
 * qos/qos.h - thread QoS levels and the Gewu on-device inference service (C ABI, library libqos.so).
 * Names, values and layouts follow the platform's public ABI; the text is this project's own.
 */
#ifndef QOS_H
#define QOS_H

#ifdef __cplusplus
extern "C" {
#endif

/* ---- thread QoS (API 12) ---- */
typedef enum QoS_Level {
    QOS_BACKGROUND = 0,       /* work the user does not see */
    QOS_UTILITY = 1,          /* background work that matters */
    QOS_DEFAULT = 2,
    QOS_USER_INITIATED = 3,   /* the user asked for it */
    QOS_DEADLINE_REQUEST = 4, /* must be done by a time */
    QOS_USER_INTERACTIVE = 5  /* the user is waiting on it */
} QoS_Level;

int OH_QoS_SetThreadQoS(QoS_Level level);   /* 0; -1 out of range or internal error */
int OH_QoS_ResetThreadQoS(void);            /* 0; -1 when none was set */
int OH_QoS_GetThreadQoS(QoS_Level *level);  /* 0; -1 when NULL or none was set */

/* ---- Gewu (API 20) ---- */
typedef unsigned int OH_QoS_GewuSession;
typedef unsigned int OH_QoS_GewuRequest;
#define OH_QOS_GEWU_INVALID_SESSION_ID ((OH_QoS_GewuSession)(0xffffffffU))
#define OH_QOS_GEWU_INVALID_REQUEST_ID ((OH_QoS_GewuRequest)(0xffffffffU))

typedef enum {
    OH_QOS_GEWU_OK = 0,
    OH_QOS_GEWU_NOPERM = 201, /* the caller may not do this */
    OH_QOS_GEWU_NOMEM = 203,  /* not enough memory now; free some and try again */
    OH_QOS_GEWU_INVAL = 401,  /* a parameter has a wrong type, form or value */
    OH_QOS_GEWU_EXIST = 501,  /* the handle already exists */
    OH_QOS_GEWU_NOENT = 502,  /* no such session or request */
    OH_QOS_GEWU_NOSYS = 801,  /* the service is not there, or does not answer */
    OH_QOS_GEWU_FAULT = 901   /* any other fault */
} OH_QoS_GewuErrorCode;

typedef struct {
    OH_QoS_GewuSession session;   /* valid only when error is OH_QOS_GEWU_OK */
    OH_QoS_GewuErrorCode error;
} OH_QoS_GewuCreateSessionResult;

typedef struct {
    OH_QoS_GewuRequest request;   /* valid only when error is OH_QOS_GEWU_OK */
    OH_QoS_GewuErrorCode error;
} OH_QoS_GewuSubmitRequestResult;

/* response: JSON {"message":{"role":"assistant","content":string},"finish_reason":null|"stop"|"abort"|"length"};
 * the pointer is valid only during the call. */
typedef void (*OH_QoS_GewuOnResponse)(void* context, const char* response);

/*
 * All four may be called from any thread, also from a callback. None waits for the service longer than 5 s. After that
 * time Create and Submit return OH_QOS_GEWU_NOSYS; their session or request is ended when the service continues, and no
 * callback is called. Destroy then returns OH_QOS_GEWU_OK, because the session has ended in this process. Abort does
 * not wait for the service. Abort and Destroy wait until a callback that runs on another thread has returned. Strings
 * are UTF-8, at most 16 MiB.
 */
OH_QoS_GewuCreateSessionResult OH_QoS_GewuCreateSession(const char* attributes);
OH_QoS_GewuErrorCode OH_QoS_GewuDestroySession(OH_QoS_GewuSession session);
OH_QoS_GewuErrorCode OH_QoS_GewuAbortRequest(OH_QoS_GewuSession session, OH_QoS_GewuRequest request);
OH_QoS_GewuSubmitRequestResult OH_QoS_GewuSubmitRequest(OH_QoS_GewuSession session, const char* request,
    OH_QoS_GewuOnResponse callback, void* context);

#ifdef __cplusplus
}
#endif
#endif /* QOS_H */
