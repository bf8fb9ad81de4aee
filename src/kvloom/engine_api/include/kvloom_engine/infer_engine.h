/*
 * The Engine API: token ids or text in, a callback for every token (spec 3.3.1). Link with -lkvloom_engine.
 *
 * The model runs in a process of its own, which Init starts and Finalize ends. Calls report failures as a Status; the
 * only exception that they throw is std::bad_alloc.
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
 * An engine, usable from Init until Finalize. All functions may be called from any thread, also from a callback, unless
 * they say otherwise. An engine has one thread that runs its callbacks, one after another. If a callback throws, a line
 * goes to stderr, its request is stopped, and Finalize reports it.
 *
 * A request that Forward has accepted ends exactly once: only its last response has a flag other than CONTINUE. If the
 * model's process dies, its requests end with EXEC_ERROR, and calls return ERROR until Finalize and another Init.
 *
 * In the child of a fork no engine is initialised; the child may call Init.
 */
class InferenceEngine {
public:
    InferenceEngine();
    InferenceEngine(const InferenceEngine &) = delete;
    InferenceEngine &operator = (const InferenceEngine &) = delete;

    /* Finalizes the engine if it is initialised. In a callback of this engine it does not wait; its requests still end.
       */
    ~InferenceEngine();

    /*
     * Loads the model of a config.json ("" = conf/config.json); there is no time limit. `callback` gets the responses
     * of requests without a callback of their own. INVALID_ARG: the message says what is wrong with the file.
     */
    Status Init(const SendResponseCallback &callback = nullptr, const std::string &configPath = "");

    /* KV blocks, requests and prompt tokens that could start now, besides the requests already forwarded. */
    Status GetRequestBlockQuotas(uint64_t *remainBlocks, uint64_t *remainPrefillSlots, uint64_t *remainPrefill);

    /*
     * Starts a request. With `validRequest` invalid token ids and lengths return INVALID_ARG; without, such a request
     * is accepted and ends with ILLEGAL_INPUT. INVALID_ARG also for an id that is in use. The callback is called only
     * after OK.
     */
    Status Forward(std::shared_ptr<InferenceRequest> &request, bool validRequest = false);

    /* The number of requests that have not had their last response; 0 while the engine is not initialised. */
    Status GetProcessingRequest(uint64_t *num);

    /* STOP ends a request; its last response has the flag CANCEL. NOT_FOUND if it is not running. */
    Status ControlRequest(const RequestId &requestId, Operation operation);

    /* Ends running requests (EXEC_ERROR) and the model's process; returns after the last callback. Not from a callback.
       */
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
