/* The ends of an engine: callbacks that throw, an engine destroyed with requests running, in a callback too. ends CONFIG */
#include <stdexcept>
#include <thread>

#include "check.hpp"

static void CheckThrows(const char *config)
{
    Inbox inbox;
    InferenceEngine engine;
    CHECK_OK(engine.Init(inbox.Callback(), config));
    auto bad = MakeRequest(RequestId("bad"), NEVER_EOS), worse = MakeRequest(RequestId("worse"), NEVER_EOS);
    bad->SetSendResponseCallback([](std::shared_ptr<InferenceResponse> &) { throw std::runtime_error("no disk"); });
    worse->SetSendResponseCallback([&inbox](std::shared_ptr<InferenceResponse> &response) {
        inbox.Put(*response);
        throw 1;
    });
    auto good = MakeRequest(RequestId("good"), NEVER_EOS, 30);
    CHECK_OK(engine.Forward(bad));
    CHECK_OK(engine.Forward(worse));
    CHECK_OK(engine.Forward(good));
    CHECK(inbox.Wait("good").ids.size() == 30);
    CHECK(inbox.Wait("worse").flag == INFER_RESPONSE_CANCEL);
    uint64_t number = 1;
    while (number > 0) {
        CHECK_OK(engine.GetProcessingRequest(&number));
    }
    CHECK_STATUS(engine.Finalize(), ERROR, "a callback threw no disk");
    CHECK_OK(engine.Init(inbox.Callback(), config));
    CHECK_STATUS(engine.Finalize(), OK, "Success");
}

/* Its destructor finalizes: what runs has ended when it returns. */
static void CheckDestructor(const char *config)
{
    Inbox inbox;
    {
        InferenceEngine engine;
        CHECK_OK(engine.Init(inbox.Callback(), config));
        for (uint64_t index = 0; index < 5; index++) {
            auto request = MakeRequest(RequestId(index), NEVER_EOS);
            CHECK_OK(engine.Forward(request));
        }
    }
    CHECK(inbox.NumLast() == 5);
}

/* A callback destroys its engine, and the functor that holds it: the other requests still end, on the same thread. */
static void CheckSuicide(const char *config)
{
    Inbox inbox;
    auto *engine = new InferenceEngine;
    CHECK_OK(engine->Init(inbox.Callback(), config));
    for (uint64_t index = 0; index < 5; index++) {
        auto request = MakeRequest(RequestId(index), NEVER_EOS);
        CHECK_OK(engine->Forward(request));
    }
    auto last = MakeRequest(RequestId("last"), NEVER_EOS, 1);
    const auto owner = std::make_shared<std::unique_ptr<InferenceEngine>>(engine);
    last->SetSendResponseCallback([owner, &inbox](std::shared_ptr<InferenceResponse> &response) {
        owner->reset();
        inbox.Put(*response);
    });
    CHECK_OK(engine->Forward(last));
    CHECK(inbox.Wait("last").flag == INFER_RESPONSE_REACH_MAX_OUTPUT_LEN);
    for (uint64_t index = 0; index < 5; index++) {
        CHECK(inbox.Wait(std::to_string(index)).flag == INFER_RESPONSE_EXEC_ERROR);
    }
}

/* Two engines in one process, one initialised in a callback of the other. */
static void CheckTwo(const char *config)
{
    Inbox inbox;
    InferenceEngine first, second;
    auto request = MakeRequest(RequestId("a"), NEVER_EOS, 3);
    request->SetSendResponseCallback([&](std::shared_ptr<InferenceResponse> &response) {
        if (response->IsEOS()) {
            auto other = MakeRequest(RequestId("b"), NEVER_EOS, 3);
            CHECK_OK(second.Init(inbox.Callback(), config));
            CHECK_OK(second.Forward(other));
            inbox.Put(*response);
        }
    });
    CHECK_OK(first.Init(nullptr, config));
    CHECK_OK(first.Forward(request));
    inbox.Wait("a");
    CHECK(inbox.Wait("b").ids.size() == 3);
    CHECK_OK(first.Finalize());
    CHECK_OK(second.Finalize());
}

int main(int, char **argv)
{
    CheckThrows(argv[1]);
    CheckDestructor(argv[1]);
    CheckSuicide(argv[1]);
    CheckTwo(argv[1]);
    return 0;
}
