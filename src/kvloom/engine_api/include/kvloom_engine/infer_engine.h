/*
 * The Engine API: token ids or text in, a callback for every token (spec 3.3.1). Link with -lkvloom_engine.
 *
 * The model runs in a process of its own, which Init starts and Finalize ends. Calls throw nothing but
 * std::bad_alloc.
 */
#ifndef KVLOOM_INFER_ENGINE_H
#define KVLOOM_INFER_ENGINE_H

#include <cstdint>
#include <memory>
#include <string>

#include "infer_request.h"
#include "infer_response.h"
#include "infer_status.h"
#include "infer_types.h"

namespace llm {
namespace engine {

/*
 * Init ... Finalize. Calls may come from any thread, also from a callback. The callbacks of an engine run one after
 * another on a thread of its own; one that throws is told on stderr, its request is stopped, and Finalize reports it.
 *
 * A request that Forward has accepted ends exactly once: one response has a flag other than CONTINUE, and it is the last.
 * When the process of the model dies, the requests end with EXEC_ERROR, and calls answer ERROR until Finalize and Init.
 *
 * In the child of a fork no engine is initialised; it may call Init for one of its own.
 */
class InferenceEngine {
public:
    InferenceEngine();
    InferenceEngine(const InferenceEngine &) = delete;
    InferenceEngine &operator = (const InferenceEngine &) = delete;

    /* Finalizes what is initialised. In a callback of its own requests it does not wait for them; they still end. */
    ~InferenceEngine();

    /*
     * Loads the model of a config.json ("": conf/config.json), which takes as long as it takes. `callback` gets the
     * responses of requests that bring none of their own. INVALID_ARG says what is wrong with the file.
     */
    Status Init(const SendResponseCallback &callback = nullptr, const std::string &configPath = "");

    /* What could start at once, beside what has been handed over already: KV blocks, requests, prompt tokens. */
    Status GetRequestBlockQuotas(uint64_t *remainBlocks, uint64_t *remainPrefillSlots, uint64_t *remainPrefill);

    /*
     * Starts a request. With `validRequest` token ids and lengths are checked here, else a bad one ends with
     * ILLEGAL_INPUT. INVALID_ARG also for an id that is in use. Unless it is OK no callback comes.
     */
    Status Forward(std::shared_ptr<InferenceRequest> &request, bool validRequest = false);

    /* Requests that have not had their last response; 0 while nothing is initialised. */
    Status GetProcessingRequest(uint64_t *num);

    /* STOP: the request's last response has the flag CANCEL. NOT_FOUND for one that does not run. */
    Status ControlRequest(const RequestId &requestId, Operation operation);

    /* Ends what runs (EXEC_ERROR); returns after the last callback. Not from a callback. */
    Status Finalize();

    Status GetMaxBatchSize(uint64_t *batchSize);

private:
    struct Inner;
    std::unique_ptr<Inner> inner_;
};

}
}

/* The document's programs are written in this namespace. */
namespace SimpleLLMInference {

using namespace llm::engine;

}

#endif
