/*
 * Many threads on one engine: they begin, stop and count requests, callbacks call back in, and the engine is finalized
 * by two threads at once while all of that goes on. Every request that was accepted ends exactly once.
 * threads CONFIG ROUNDS
 */
#include <atomic>
#include <thread>

#include "check.hpp"

static constexpr int NUM_THREADS = 8, NUM_REQUESTS = 12;

struct Run {
    InferenceEngine engine;
    Inbox inbox;
    std::atomic<int> num_accepted{0}, num_refused{0};
    std::atomic<uint64_t> last_chained{0};
};

/* From a callback: asks, stops every fifth, and begins another at the end of every third. */
static void Respond(Run &run, std::shared_ptr<InferenceResponse> &response)
{
    uint64_t number = 0, slots = 0, tokens = 0;
    run.inbox.Put(*response);
    CHECK_OK(run.engine.GetProcessingRequest(&number));
    const uint64_t index = response->GetRequestId().UnsignedIntValue();
    if (!response->IsEOS()) {
        if (index % 5 == 0) {
            run.engine.ControlRequest(response->GetRequestId(), Operation::STOP);
        }
        return;
    }
    run.engine.GetRequestBlockQuotas(&number, &slots, &tokens);
    CHECK_STATUS(run.engine.Finalize(), ERROR, "");
    if (index % 3 == 0 && index < 1000000) {
        auto next = MakeRequest(RequestId(1000000 + ++run.last_chained), NEVER_EOS, 2);
        (run.engine.Forward(next).IsOk() ? run.num_accepted : run.num_refused)++;
    }
}

static void Work(Run &run, int thread)
{
    for (int index = 0; index < NUM_REQUESTS; index++) {
        const auto name = static_cast<uint64_t>(thread * 1000 + index);
        auto request = MakeRequest(RequestId(name), {1, 2, static_cast<int64_t>(index)}, 8);
        (run.engine.Forward(request, index % 2 == 0).IsOk() ? run.num_accepted : run.num_refused)++;
        uint64_t number = 0, slots = 0, tokens = 0;
        run.engine.GetRequestBlockQuotas(&number, &slots, &tokens);
        if (index % 4 == 1) {
            run.engine.ControlRequest(RequestId(name), Operation::STOP);
        }
    }
}

int main(int, char **argv)
{
    for (int round = 0; round < std::atoi(argv[2]); round++) {
        Run run;
        CHECK_OK(run.engine.Init([&run](std::shared_ptr<InferenceResponse> &r) { Respond(run, r); }, argv[1]));
        std::vector<std::thread> threads;
        for (int thread = 1; thread <= NUM_THREADS; thread++) {
            threads.emplace_back(Work, std::ref(run), thread);
        }
        while (run.inbox.NumLast() < NUM_THREADS * NUM_REQUESTS / 2) {
            usleep(1000);
        }
        std::atomic<int> num_finalized{0};
        const auto finalize = [&] { num_finalized += run.engine.Finalize().IsOk(); };
        std::thread other(finalize);
        finalize();
        other.join();
        CHECK(num_finalized == 1);
        for (std::thread &thread : threads) {
            thread.join();
        }
        CHECK_STATUS(run.engine.Finalize(), ERROR, "the engine is not initialised");
        CHECK(run.inbox.NumLast() == run.num_accepted);
        CHECK(run.num_accepted + run.num_refused >= NUM_THREADS * NUM_REQUESTS);
    }
    return 0;
}
