/*
 * A service that is stopped and goes on: frozen MODEL. Prints "freeze", "thaw" and "look", and waits for a line after
 * each. While it is stopped, calls wait 0.4 s instead of a minute, see patience.h; those that come back late are repeated.
 */
#include <stdlib.h>
#include <unistd.h>

#include "../check.h"

enum { LENGTH = 8 << 20 };

static const char *model;
static int num_late;

static void count_late(void *context, const char *response)
{
    (void)context;
    (void)response;
    num_late++;
}

/* Says what the driver shall do, and waits until it has. */
static void say(const char *word)
{
    char line[8];
    printf("%s\n", word);
    fflush(stdout);
    CHECK(fgets(line, sizeof line, stdin) != NULL);
}

static void *create_late(void *argument)
{
    (void)argument;
    CHECK_EQUAL(create(model).error, OH_QOS_GEWU_NOSYS);
    return NULL;
}

/* Every call while the service is stopped; `request` runs on `session`. */
static void call_the_stopped(OH_QoS_GewuSession session, OH_QoS_GewuRequest request, OH_QoS_GewuSession other)
{
    static char large[LENGTH + 1];
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, create_late, NULL), 0);
    CHECK_EQUAL(create(model).session, OH_QOS_GEWU_INVALID_SESSION_ID);
    pthread_join(thread, NULL);
    CHECK_EQUAL(OH_QoS_GewuSubmitRequest(session, STREAMED, count_late, NULL).error, OH_QOS_GEWU_NOSYS);
    memset(large, ' ', LENGTH);
    CHECK_EQUAL(OH_QoS_GewuSubmitRequest(session, large, count_late, NULL).error, OH_QOS_GEWU_NOSYS);
    CHECK_EQUAL(OH_QoS_GewuSubmitRequest(session, STREAMED, count_late, NULL).error, OH_QOS_GEWU_NOSYS);
    CHECK_EQUAL(OH_QoS_GewuAbortRequest(session, request), OH_QOS_GEWU_OK);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(other), OH_QOS_GEWU_OK);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(other), OH_QOS_GEWU_NOENT);
}

int main(int argc, char **argv)
{
    struct mailbox box = MAILBOX, of_other = MAILBOX, later = MAILBOX;
    OH_QoS_GewuCreateSessionResult again;
    OH_QoS_GewuErrorCode error;
    CHECK(argc == 2);
    model = argv[1];
    OH_QoS_GewuSession session = session_on(model), other = session_on(model);
    OH_QoS_GewuRequest request = submit(session, put_reply, &box);
    submit(other, put_reply, &of_other);
    wait_replies(&box, 1);
    say("freeze");
    CHECK_EQUAL(setenv("TEST_PATIENCE_MS", "400", 1), 0);
    call_the_stopped(session, request, other);
    CHECK_EQUAL(unsetenv("TEST_PATIENCE_MS"), 0);
    say("thaw");
    do {
        again = create(model);
    } while (again.error == OH_QOS_GEWU_NOSYS);
    CHECK_EQUAL(again.error, OH_QOS_GEWU_OK);
    do {
        error = OH_QoS_GewuSubmitRequest(session, STREAMED, put_reply, &later).error;
    } while (error == OH_QOS_GEWU_NOSYS);
    CHECK_EQUAL(error, OH_QOS_GEWU_OK);
    wait_final(&later);
    say("look");
    CHECK_EQUAL(num_late, 0);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(session), OH_QOS_GEWU_OK);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(again.session), OH_QOS_GEWU_OK);
    return 0;
}
