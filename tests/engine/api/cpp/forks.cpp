/* Children of a process with an engine: theirs is not initialised, they may have their own; the parent goes on. forks CONFIG */
#include <sys/wait.h>

#include "check.hpp"

static void WaitChild(pid_t child)
{
    int status = 1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* In a child: the copied engine answers, and can be initialised. */
static void BeChild(InferenceEngine &engine, const char *config, bool has_own)
{
    uint64_t number = 1;
    auto request = MakeRequest(RequestId("child"), NEVER_EOS, 3);
    CHECK_STATUS(engine.Forward(request), ERROR, "the engine is not initialised");
    CHECK_STATUS(engine.Finalize(), ERROR, "the engine is not initialised");
    CHECK_OK(engine.GetProcessingRequest(&number));
    CHECK(number == 0);
    if (has_own) {
        Inbox inbox;
        CHECK_OK(engine.Init(inbox.Callback(), config));
        CHECK_OK(engine.Forward(request));
        CHECK(inbox.Wait("child").ids.size() == 3);
        CHECK_STATUS(engine.Finalize(), OK, "Success");
    }
}

int main(int, char **argv)
{
    Inbox inbox;
    InferenceEngine engine;
    CHECK_OK(engine.Init(inbox.Callback(), argv[1]));
    auto running = MakeRequest(RequestId("running"), NEVER_EOS);
    CHECK_OK(engine.Forward(running));
    inbox.WaitFirst("running");
    for (int index = 0; index < 20; index++) {
        const pid_t child = fork();
        if (child == 0) {
            BeChild(engine, argv[1], index == 0);
            if (index % 2 == 0) {
                engine.~InferenceEngine();
            }
            _exit(0);
        }
        WaitChild(child);
    }
    auto forking = MakeRequest(RequestId("forking"), NEVER_EOS, 3);
    pid_t children[3], *next = children;
    forking->SetSendResponseCallback([&](std::shared_ptr<InferenceResponse> &response) {
        const pid_t child = fork();
        if (child == 0) {
            BeChild(engine, argv[1], false);
            return;  /* which ends the child: there is no more of this thread there */
        }
        *next++ = child;
        inbox.Put(*response);
    });
    CHECK_OK(engine.Forward(forking));
    inbox.Wait("forking");
    for (const pid_t child : children) {
        WaitChild(child);
    }
    engine.ControlRequest(RequestId("running"), Operation::STOP);  /* which may have reached its end by now */
    const Inbox::Mail mail = inbox.Wait("running");
    CHECK(mail.flag == INFER_RESPONSE_CANCEL || mail.flag == INFER_RESPONSE_EOS);
    CHECK_STATUS(engine.Finalize(), OK, "Success");
    return 0;
}
