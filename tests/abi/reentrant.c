/* All four calls inside callbacks, and callbacks that wait for each other: reentrant MODEL. */
#include <unistd.h>

#include "check.h"

static const char *model;
static struct mailbox inner = MAILBOX;
static pthread_barrier_t both_run;
static OH_QoS_GewuSession sessions[2];
static int is_done[2], num_calls;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* In its first reply: a session, a request on it, an abort, and the end of its own session. */
static void call_everything(void *context, const char *response)
{
    OH_QoS_GewuSession *own = context, other;
    (void)response;
    CHECK_EQUAL(num_calls++, 0);
    other = session_on(model);
    submit(other, put_reply, &inner);
    wait_final(&inner);
    CHECK_EQUAL(OH_QoS_GewuAbortRequest(other, submit(other, put_reply, &inner)), OH_QOS_GEWU_OK);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(other), OH_QOS_GEWU_OK);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(*own), OH_QOS_GEWU_OK);
    pthread_mutex_lock(&lock);
    is_done[0] = 1;
    pthread_mutex_unlock(&lock);
}

/* Two callbacks destroy each other's session at the same time. */
static void destroy_the_other(void *context, const char *response)
{
    int own = *(int *)context;
    (void)response;
    pthread_barrier_wait(&both_run);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(sessions[1 - own]), OH_QOS_GEWU_OK);
    pthread_mutex_lock(&lock);
    is_done[own] = 1;
    pthread_mutex_unlock(&lock);
}

static void wait_done(int count)
{
    for (int done = 0; !done;) {
        sleep_s(0.001);
        pthread_mutex_lock(&lock);
        done = is_done[0] + is_done[1] == count;
        pthread_mutex_unlock(&lock);
    }
    is_done[0] = is_done[1] = 0;
}

static double began_s, ended_s;

static void sleep_in_callback(void *context, const char *response)
{
    (void)context;
    (void)response;
    began_s = now_s();
    sleep_s(0.2);
    ended_s = now_s();
}

/* Abort and Destroy return only when a callback that runs on another thread has returned. */
static void calls_wait_for_callbacks(void)
{
    for (int destroys = 0; destroys < 2; destroys++) {
        OH_QoS_GewuSession session = session_on(model);
        struct mailbox box = MAILBOX;
        (void)box;
        began_s = ended_s = 0;
        OH_QoS_GewuRequest request = submit(session, sleep_in_callback, NULL);
        sleep_s(0.1);
        if (destroys == 0) {
            CHECK_EQUAL(OH_QoS_GewuAbortRequest(session, request), OH_QOS_GEWU_OK);
        } else {
            CHECK_EQUAL(OH_QoS_GewuDestroySession(session), OH_QOS_GEWU_OK);
        }
        CHECK(began_s > 0 && ended_s > began_s);
        double seen_s = ended_s;
        sleep_s(0.1);
        CHECK(ended_s == seen_s);
        OH_QoS_GewuDestroySession(session);
    }
}

/* A slow callback of one session does not delay another session's. */
static void sessions_are_independent(void)
{
    OH_QoS_GewuSession slow = session_on(model), fast = session_on(model);
    struct mailbox box = MAILBOX;
    submit(slow, sleep_in_callback, NULL);
    sleep_s(0.02);
    double start_s = now_s();
    submit(fast, put_reply, &box);
    wait_replies(&box, 1);
    CHECK(now_s() - start_s < 0.15);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(slow), OH_QOS_GEWU_OK);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(fast), OH_QOS_GEWU_OK);
}

int main(int argc, char **argv)
{
    int own[2] = {0, 1};
    CHECK(argc == 2);
    model = argv[1];
    OH_QoS_GewuSession session = session_on(model);
    submit(session, call_everything, &session);
    wait_done(1);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(session), OH_QOS_GEWU_NOENT);

    pthread_barrier_init(&both_run, NULL, 2);
    sessions[0] = session_on(model);
    sessions[1] = session_on(model);
    submit(sessions[0], destroy_the_other, &own[0]);
    submit(sessions[1], destroy_the_other, &own[1]);
    wait_done(2);

    calls_wait_for_callbacks();
    sessions_are_independent();
    return 0;
}
