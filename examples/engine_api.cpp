/*
 * The engine as a C++ library: prompts of token ids from a CSV file, or one text, and figures at the end.
 *
 *   c++ engine_api.cpp -o engine_api $(kvloom engine --cflags --libs)
 *   ./engine_api conf/config.json dataset.csv
 *   ./engine_api conf/config.json --text "The capital of France is"
 */
#include <condition_variable>
#include <cstring>
#include <iostream>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include <data_loader.h>
#include <infer_engine.h>
#include <io_manager.h>
#include <metrics.h>
#include <util.h>

using namespace llm::engine;

static constexpr uint32_t MAX_TOKENS = 16;

/* Sends as many requests as the engine can take, and collects the responses. */
class Program {
public:
    /* If a call fails, writes the reason to stderr and returns false. */
    bool Run(const std::string &config, const std::string &dataset, const std::string &text)
    {
        const auto callback = [this](std::shared_ptr<InferenceResponse> &response) { Collect(*response); };
        if (!IsDone("init", engine_.Init(callback, config))) {
            return false;
        }
        const auto started = std::chrono::steady_clock::now();
        const bool is_sent = text.empty() ? SendRows(dataset) : SendText(text);
        std::unique_lock<std::mutex> held(lock_);
        ended_.wait(held, [this] { return num_running_ == 0; });
        SimpleLLMInference::Statistics statistics;
        statistics.requestNumber = static_cast<int64_t>(metrics_.size());
        statistics.latencyForAll = SimpleLLMInference::GetDuration(std::chrono::steady_clock::now(), started);
        SimpleLLMInference::FormatMetrics(metrics_, statistics);
        SimpleLLMInference::PrintStatistics(statistics);
        held.unlock();
        return IsDone("finalize", engine_.Finalize()) && is_sent;
    }

private:
    static bool IsDone(const char *what, const Status &status)
    {
        if (!status.IsOk()) {
            std::cerr << what << ": " << Error(status.StatusCode(), status.StatusMsg()).ToString() << std::endl;
        }
        return status.IsOk();
    }

    /* The callback: called once per token, always on the same thread. */
    void Collect(InferenceResponse &response)
    {
        InferenceResponse::Output *output = nullptr;
        if (!IsDone("output", response.ImmutableOutput("OUTPUT_IDS", &output))) {
            return;
        }
        const auto now = std::chrono::steady_clock::now();
        const auto *ids = static_cast<const int64_t *>(output->Buffer());
        const std::lock_guard<std::mutex> held(lock_);
        SimpleLLMInference::Metrics &metrics = metrics_[response.GetRequestId().StringValue()];
        const size_t cost = SimpleLLMInference::GetDuration(
            now, metrics.tokensOutput == 0 ? metrics.startingTime : metrics.lastTokenTime);
        if (metrics.tokensOutput == 0) {
            metrics.firstTokenCost = cost;
        } else {
            metrics.decodeTime.push_back(cost);
        }
        metrics.tokensOutput += output->ByteSize() / sizeof(int64_t);
        metrics.lastTokenTime = now;
        metrics.lastTokenCost = cost;
        metrics.outputTokenIds.insert(metrics.outputTokenIds.end(), ids, ids + output->Shape()[0]);
        if (response.IsEOS()) {
            std::cout << response.GetRequestId().StringValue() << ":";
            for (const int64_t id : metrics.outputTokenIds) {
                std::cout << " " << id;
            }
            std::cout << "; flag " << response.GetFlags() << " " << response.ErrorMsg() << std::endl;
            num_running_--;
            ended_.notify_all();
        }
    }

    bool Send(std::shared_ptr<InferenceRequest> request, size_t num_tokens)
    {
        request->SetMaxOutputLen(MAX_TOKENS);
        {
            const std::lock_guard<std::mutex> held(lock_);
            SimpleLLMInference::Metrics &metrics = metrics_[request->GetRequestId().StringValue()];
            metrics.tokensInput = num_tokens;
            metrics.startingTime = std::chrono::steady_clock::now();
            num_running_++;
        }
        const bool is_sent = IsDone("forward", engine_.Forward(request));
        const std::lock_guard<std::mutex> held(lock_);
        num_running_ -= !is_sent;
        return is_sent;
    }

    bool SendText(const std::string &text)
    {
        const auto request = std::make_shared<InferenceRequest>(RequestId("text"));
        request->SetInputText(text);
        return Send(request, 0);
    }

    /* Sends rows as blocks, slots and prompt tokens become free. */
    bool SendRows(const std::string &dataset)
    {
        SimpleLLMInference::IOManager rows;
        uint64_t max_batch = 0, blocks = 0, slots = 0, tokens = 0, running = 0;
        bool is_good = rows.SetInputData(dataset) && IsDone("batch size", engine_.GetMaxBatchSize(&max_batch));
        while (is_good && !rows.Empty()) {
            is_good = IsDone("quotas", engine_.GetRequestBlockQuotas(&blocks, &slots, &tokens)) &&
                IsDone("running", engine_.GetProcessingRequest(&running));
            if (blocks > 0 && tokens > 0 && running < max_batch) {
                for (const auto &row : rows.GetInputDataByQuotas(blocks, slots, tokens, max_batch - running)) {
                    is_good = is_good && Send(SimpleLLMInference::MakeRequest(*row), row->size);
                }
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
        return is_good;
    }

    InferenceEngine engine_;
    std::mutex lock_;
    std::condition_variable ended_;
    std::map<std::string, SimpleLLMInference::Metrics> metrics_;
    int num_running_ = 0;
};

int main(int argc, char **argv)
{
    const bool is_text = argc == 4 && std::strcmp(argv[2], "--text") == 0;
    if (argc != 3 && !is_text) {
        std::cerr << "usage: " << argv[0] << " CONFIG.json (DATASET.csv | --text TEXT)" << std::endl;
        return 2;
    }
    return Program().Run(argv[1], argv[2], is_text ? argv[3] : "") ? 0 : 1;
}
