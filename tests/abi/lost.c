/*
 * The daemon dies under a request: lost MODEL. Prints "running", and the driver kills the daemon; prints "lost", and the
 * driver starts a new one. Waits for a line after each.
 */
#include <unistd.h>

#include "check.h"

int main(int argc, char **argv)
{
    struct mailbox first = MAILBOX, queued = MAILBOX, later = MAILBOX;
    char line[8];
    CHECK(argc == 2);
    OH_QoS_GewuSession session = session_on(argv[1]), idle = session_on(argv[1]);
    submit(session, put_reply, &first);
    submit(session, put_reply, &queued);
    wait_replies(&first, 1);
    printf("running\n");
    fflush(stdout);
    CHECK(fgets(line, sizeof line, stdin) != NULL);
    wait_final(&first);
    wait_final(&queued);
    CHECK(strstr(first.last, "\"finish_reason\":\"abort\",\"error\":{\"code\":901") != NULL);
    CHECK(strstr(queued.last, "\"finish_reason\":\"abort\"") != NULL);
    CHECK_EQUAL(OH_QoS_GewuSubmitRequest(session, STREAMED, put_reply, &later).error, OH_QOS_GEWU_NOENT);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(session), OH_QOS_GEWU_NOENT);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(idle), OH_QOS_GEWU_NOENT);
    CHECK_EQUAL(create(argv[1]).error, OH_QOS_GEWU_NOSYS);
    CHECK_EQUAL(create(argv[1]).session, OH_QOS_GEWU_INVALID_SESSION_ID);
    printf("lost\n");
    fflush(stdout);
    CHECK(fgets(line, sizeof line, stdin) != NULL);
    OH_QoS_GewuSession again = session_on(argv[1]);
    CHECK(again > idle);
    submit(again, put_reply, &later);
    wait_final(&later);
    CHECK_EQUAL(first.num_final, 1);
    CHECK_EQUAL(queued.num_final, 1);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(again), OH_QOS_GEWU_OK);
    return 0;
}
