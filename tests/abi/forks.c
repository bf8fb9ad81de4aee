/* Children of a process that is generating: forks MODEL COUNT. */
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static void child(const char *model, OH_QoS_GewuSession session, OH_QoS_GewuRequest request)
{
    struct mailbox box = MAILBOX;
    CHECK_EQUAL(OH_QoS_GewuAbortRequest(session, request), OH_QOS_GEWU_NOENT);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(session), OH_QOS_GEWU_NOENT);
    OH_QoS_GewuSession own = session_on(model);
    submit(own, put_reply, &box);
    wait_replies(&box, 1);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(own), OH_QOS_GEWU_OK);
    _exit(0);
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    for (int i = atoi(argv[2]); i > 0; i--) {
        struct mailbox box = MAILBOX;
        int status;
        OH_QoS_GewuSession session = session_on(argv[1]);
        OH_QoS_GewuRequest request = submit(session, put_reply, &box);
        pid_t pid = fork();
        if (pid == 0) {
            alarm(10);
            child(argv[1], session, request);
        }
        wait_final(&box);
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
        CHECK_EQUAL(OH_QoS_GewuDestroySession(session), OH_QOS_GEWU_OK);
    }
    return 0;
}
