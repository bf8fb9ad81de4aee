/* Shared by the programs of this folder: checks, a mailbox that a callback fills, time. */
#ifndef CHECK_H
#define CHECK_H

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <qos/qos.h>

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            _exit(1); \
        } \
    } while (0)

#define CHECK_EQUAL(found, expected) \
    do { \
        long found_ = (long)(found), expected_ = (long)(expected); \
        if (found_ != expected_) { \
            fprintf(stderr, "%s:%d: %s is %ld, not %ld\n", __FILE__, __LINE__, #found, found_, expected_); \
            _exit(1); \
        } \
    } while (0)

/* Replies to one request. */
struct mailbox {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int num_replies, num_final;
    char text[4096];
    char last[4096];
};

#define MAILBOX {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, "", ""}

static inline double now_s(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static inline void sleep_s(double seconds)
{
    struct timespec time = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&time, NULL);
}

/* The callback of a mailbox; appends `content` as it is spelt in the JSON. */
static inline void put_reply(void *context, const char *response)
{
    struct mailbox *box = context;
    const char *content = strstr(response, "\"content\":\""), *end;
    pthread_mutex_lock(&box->lock);
    CHECK(content != NULL && strstr(response, "\"finish_reason\":") != NULL);
    content += strlen("\"content\":\"");
    end = strstr(content, "\"}");
    CHECK(end != NULL);
    if (strlen(box->text) + (size_t)(end - content) < sizeof box->text) {
        strncat(box->text, content, (size_t)(end - content));
    }
    snprintf(box->last, sizeof box->last, "%s", response);
    box->num_replies++;
    box->num_final += strstr(response, "\"finish_reason\":null") == NULL;
    pthread_cond_broadcast(&box->changed);
    pthread_mutex_unlock(&box->lock);
}

static inline void wait_replies(struct mailbox *box, int num_replies)
{
    pthread_mutex_lock(&box->lock);
    while (box->num_replies < num_replies) {
        pthread_cond_wait(&box->changed, &box->lock);
    }
    pthread_mutex_unlock(&box->lock);
}

static inline void wait_final(struct mailbox *box)
{
    pthread_mutex_lock(&box->lock);
    while (box->num_final == 0) {
        pthread_cond_wait(&box->changed, &box->lock);
    }
    pthread_mutex_unlock(&box->lock);
}

static inline OH_QoS_GewuCreateSessionResult create(const char *model)
{
    char attributes[4200];
    snprintf(attributes, sizeof attributes, "{\n  \"model\": \"%s\"\n}", model);
    return OH_QoS_GewuCreateSession(attributes);
}

static inline OH_QoS_GewuSession session_on(const char *model)
{
    OH_QoS_GewuCreateSessionResult result = create(model);
    CHECK_EQUAL(result.error, OH_QOS_GEWU_OK);
    CHECK(result.session != 0 && result.session != OH_QOS_GEWU_INVALID_SESSION_ID);
    return result.session;
}

#define STREAMED "{\"messages\": [\n{\"role\": \"user\", \"content\": \"hi\"}],\n\"stream\": true}"
#define WHOLE "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}"

static inline OH_QoS_GewuRequest submit(OH_QoS_GewuSession session, OH_QoS_GewuOnResponse callback, void *context)
{
    OH_QoS_GewuSubmitRequestResult result = OH_QoS_GewuSubmitRequest(session, STREAMED, callback, context);
    CHECK_EQUAL(result.error, OH_QOS_GEWU_OK);
    return result.request;
}

#endif
