/* Several threads destroy one session, or abort one request, at the same time: races MODEL ROUNDS. */
#include <unistd.h>

#include "check.h"

enum { RACERS = 4 };

static pthread_barrier_t start;
static OH_QoS_GewuSession session;
static OH_QoS_GewuRequest request;
static pthread_t submitter;

/* Callbacks come on another thread than Submit's. */
static void check_thread(void *context, const char *response)
{
    CHECK(!pthread_equal(pthread_self(), submitter));
    put_reply(context, response);
}

static void *destroy(void *argument)
{
    (void)argument;
    pthread_barrier_wait(&start);
    return (void *)(size_t)OH_QoS_GewuDestroySession(session);
}

static void *abort_request(void *argument)
{
    (void)argument;
    pthread_barrier_wait(&start);
    return (void *)(size_t)OH_QoS_GewuAbortRequest(session, request);
}

/* Exactly one call returns OK, all others NOENT. */
static void race(void *(*call)(void *))
{
    pthread_t threads[RACERS];
    void *error;
    int num_ok = 0;
    for (int i = 0; i < RACERS; i++) {
        CHECK_EQUAL(pthread_create(&threads[i], NULL, call, NULL), 0);
    }
    for (int i = 0; i < RACERS; i++) {
        CHECK_EQUAL(pthread_join(threads[i], &error), 0);
        CHECK((size_t)error == OH_QOS_GEWU_OK || (size_t)error == OH_QOS_GEWU_NOENT);
        num_ok += (size_t)error == OH_QOS_GEWU_OK;
    }
    CHECK_EQUAL(num_ok, 1);
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    submitter = pthread_self();
    pthread_barrier_init(&start, NULL, RACERS);
    for (int i = atoi(argv[2]); i > 0; i--) {
        struct mailbox box = MAILBOX;
        session = session_on(argv[1]);
        request = submit(session, check_thread, &box);
        wait_replies(&box, 1);
        race(abort_request);
        submit(session, put_reply, &box);
        race(destroy);
        CHECK(box.num_final <= 2);  /* both requests may have ended by themselves before the race */
    }
    return 0;
}
