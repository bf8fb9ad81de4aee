/* An app whose timer interrupts every system call of its main thread: storm MODEL ROUNDS. */
#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include "../check.h"

static volatile sig_atomic_t num_alarms;

static void on_alarm(int number)
{
    (void)number;
    num_alarms++;
}

int main(int argc, char **argv)
{
    struct itimerval often = {{0, 200}, {0, 200}}, never = {{0, 0}, {0, 0}};
    struct sigaction action = {.sa_handler = on_alarm};  /* no SA_RESTART */
    CHECK(argc == 3);
    CHECK(sigaction(SIGALRM, &action, NULL) == 0 && setitimer(ITIMER_REAL, &often, NULL) == 0);
    for (int i = atoi(argv[2]); i > 0; i--) {
        struct mailbox box = MAILBOX;
        OH_QoS_GewuSession session = session_on(argv[1]);
        submit(session, put_reply, &box);
        wait_replies(&box, 1);
        CHECK_EQUAL(OH_QoS_GewuAbortRequest(session, submit(session, put_reply, &box)), OH_QOS_GEWU_OK);
        CHECK_EQUAL(OH_QoS_GewuDestroySession(session), OH_QOS_GEWU_OK);
    }
    CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0 && num_alarms > 0);
    return 0;
}
