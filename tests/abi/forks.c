/* Children of a process that is generating, also made inside a callback: forks MODEL COUNT. */
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

/* The parent's socket is not open here: the service would not see the parent end. */
static void check_no_sockets(void)
{
    struct stat status;
    for (int fd = 3; fd < 256; fd++) {
        CHECK(fstat(fd, &status) != 0 || !S_ISSOCK(status.st_mode));
    }
}

static void child(const char *model, OH_QoS_GewuSession session, OH_QoS_GewuRequest request)
{
    struct mailbox box = MAILBOX;
    check_no_sockets();
    CHECK_EQUAL(OH_QoS_GewuAbortRequest(session, request), OH_QOS_GEWU_NOENT);
    CHECK_EQUAL(OH_QoS_GewuSubmitRequest(session, STREAMED, put_reply, &box).error, OH_QOS_GEWU_NOENT);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(session), OH_QOS_GEWU_NOENT);
    OH_QoS_GewuSession own = session_on(model);
    submit(own, put_reply, &box);
    wait_replies(&box, 1);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(own), OH_QOS_GEWU_OK);
    _exit(0);
}

struct forker {
    const char *model;
    OH_QoS_GewuSession session;
    pid_t pid;
    struct mailbox box;
};

/* In the first reply the process forks; the child makes every call, here, where its parent's callback began. */
static void fork_in_callback(void *context, const char *response)
{
    struct forker *forker = context;
    if (forker->pid == 0) {
        forker->pid = fork();
        if (forker->pid == 0) {
            alarm(10);
            child(forker->model, forker->session, 1);
        }
    }
    put_reply(&forker->box, response);
}

static void forks_in_a_callback(const char *model)
{
    struct forker forker = {.model = model, .session = session_on(model), .box = MAILBOX};
    int status;
    submit(forker.session, fork_in_callback, &forker);
    wait_final(&forker.box);
    CHECK(waitpid(forker.pid, &status, 0) == forker.pid && status == 0);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(forker.session), OH_QOS_GEWU_OK);
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
    forks_in_a_callback(argv[1]);
    return 0;
}
