/*
 * One engine whose host behaves as its test prescribes. Prints the result of each call, one per line.
 * probe [kill|freeze PIDFILE [CONFIG]]: starts two requests, kills or freezes the host, and calls it again.
 */
#include <csignal>
#include <fstream>
#include <iostream>

#include "check.hpp"

static void Print(const char *what, const Status &status)
{
    std::cout << what << " " << static_cast<int>(status.StatusCode()) << " " << status.StatusMsg() << std::endl;
}

static void PrintMail(Inbox &inbox, const char *name)
{
    const Inbox::Mail mail = inbox.Wait(name);
    std::cout << name << " " << mail.flag << " " << mail.num_last << " " << mail.error << std::endl;
}

static pid_t ReadPid(const char *path)
{
    pid_t pid = 0;
    std::ifstream(path) >> pid;
    CHECK(pid > 0);
    return pid;
}

int main(int argc, char **argv)
{
    Inbox inbox;
    InferenceEngine engine;
    const std::string mode = argc > 1 ? argv[1] : "";
    const Status status = engine.Init(inbox.Callback(), argc > 3 ? argv[3] : "config");
    Print("init", status);
    if (!status.IsOk()) {
        return 0;
    }
    auto first = MakeRequest(RequestId("first"), NEVER_EOS), second = MakeRequest(RequestId("second"), NEVER_EOS);
    const Status begun = engine.Forward(first);
    Print("forward", begun);
    if (!mode.empty()) {
        inbox.WaitFirst("first");
        CHECK_OK(engine.Forward(second));
        kill(ReadPid(argv[2]), mode == "kill" ? SIGKILL : SIGSTOP);
        if (mode == "kill") {
            PrintMail(inbox, "first");
            PrintMail(inbox, "second");
        }
        auto third = MakeRequest(RequestId("third"), NEVER_EOS);
        Print("forward", engine.Forward(third));
    } else if (begun.IsOk()) {
        PrintMail(inbox, "first");
    }
    uint64_t blocks = 0, slots = 0, tokens = 0;
    Print("quotas", engine.GetRequestBlockQuotas(&blocks, &slots, &tokens));
    Print("finalize", engine.Finalize());
    if (mode == "freeze") {
        PrintMail(inbox, "first");
        PrintMail(inbox, "second");
    }
    std::cout << "ended " << inbox.NumLast() << std::endl;
    if (mode == "kill") {
        Print("again", engine.Init(inbox.Callback(), argv[3]));
        Print("finalize", engine.Finalize());
    }
    return 0;
}
