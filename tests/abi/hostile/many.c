/* A thousand sessions, 400 of them with a request, ended by eight threads: many MODEL. */
#include <unistd.h>

#include "../check.h"

enum { SESSIONS = 1000, REQUESTS = 400, THREADS = 8 };

static OH_QoS_GewuSession sessions[SESSIONS];
static struct mailbox boxes[REQUESTS];

static void *destroy_some(void *argument)
{
    for (size_t i = (size_t)argument; i < SESSIONS; i += THREADS) {
        CHECK_EQUAL(OH_QoS_GewuDestroySession(sessions[i]), OH_QOS_GEWU_OK);
        CHECK_EQUAL(OH_QoS_GewuDestroySession(sessions[i]), OH_QOS_GEWU_NOENT);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t threads[THREADS];
    CHECK(argc == 2);
    for (int i = 0; i < SESSIONS; i++) {
        sessions[i] = session_on(argv[1]);
    }
    for (int i = 0; i < REQUESTS; i++) {
        boxes[i] = (struct mailbox)MAILBOX;
        submit(sessions[i], put_reply, &boxes[i]);
    }
    for (int i = 0; i < REQUESTS; i += 2) {
        wait_final(&boxes[i]);
    }
    for (size_t i = 0; i < THREADS; i++) {
        CHECK_EQUAL(pthread_create(&threads[i], NULL, destroy_some, (void *)i), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    return 0;
}
