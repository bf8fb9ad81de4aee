/* InferenceEngine: checks arguments and state, and passes calls to a Link. */
#include "kvloom_engine/infer_engine.h"

#include "link.hpp"
#include "request.hpp"

namespace llm {
namespace engine {

using kvloom::Held;
using kvloom::Link;
using kvloom::lock;

struct InferenceEngine::Inner {
    std::shared_ptr<Link> link;  /* guarded by the lock; empty while nothing is initialised */

    /* The link of this process, in any state. Lock held. */
    std::shared_ptr<Link> Any() const
    {
        return link != nullptr && !link->IsForked() ? link : nullptr;
    }

    /* The link when it can be used. Lock held. */
    std::shared_ptr<Link> Open() const
    {
        const auto found = Any();
        return found != nullptr && found->CurrentState() == Link::State::OPEN ? found : nullptr;
    }
};

static Status NotReady()
{
    return Status(Error::Code::ERROR, "the engine is not initialised");
}

static Status IsNull(const char *name)
{
    return Status(Error::Code::INVALID_ARG, std::string(name) + ": must not be NULL");
}

InferenceEngine::InferenceEngine() : inner_(new Inner) {}

InferenceEngine::~InferenceEngine()
{
    std::shared_ptr<Link> link;  /* let go without the lock */
    Held held(lock);
    link = inner_->Open();
    if (link == nullptr) {
        return;
    }
    if (!link->IsCallbackThread()) {
        link->Finish(held);
    }
    held.unlock();
    link->Close();
}

Status InferenceEngine::Init(const SendResponseCallback &callback, const std::string &configPath)
{
    const auto link = std::make_shared<Link>();
    const auto shared = callback ? std::make_shared<const SendResponseCallback>(callback) : nullptr;
    Held held(lock);
    if (inner_->Any() != nullptr) {
        return Status(Error::Code::ERROR, "the engine is initialised already; finalize it first");
    }
    inner_->link = link;
    Status status = link->Start();
    if (status.IsOk()) {
        status = link->Open(held, configPath, shared);
    }
    if (!status.IsOk()) {
        inner_->link = nullptr;
        held.unlock();
        link->Close();
    }
    return status;
}

Status InferenceEngine::GetRequestBlockQuotas(
    uint64_t *remainBlocks, uint64_t *remainPrefillSlots, uint64_t *remainPrefill)
{
    if (remainBlocks == nullptr || remainPrefillSlots == nullptr || remainPrefill == nullptr) {
        return IsNull("remainBlocks, remainPrefillSlots, remainPrefill");
    }
    std::shared_ptr<Link> link;  /* let go without the lock */
    Held held(lock);
    link = inner_->Open();
    if (link == nullptr) {
        return NotReady();
    }
    const kvloom::Answer answer = link->Quotas(held);
    if (answer.status.IsOk()) {
        *remainBlocks = answer.values[0];
        *remainPrefillSlots = answer.values[1];
        *remainPrefill = answer.values[2];
    }
    return answer.status;
}

Status InferenceEngine::Forward(std::shared_ptr<InferenceRequest> &request, bool validRequest)
{
    if (request == nullptr) {
        return IsNull("request");
    }
    const auto inner = request->GetRequestInner();
    auto callback = inner->callback ? std::make_shared<const SendResponseCallback>(inner->callback) : nullptr;
    std::shared_ptr<Link> link;
    {
        Held held(lock);
        link = inner_->Open();
        if (link == nullptr) {
            return NotReady();
        }
        callback = callback != nullptr ? callback : link->DefaultCallback();
    }
    if (callback == nullptr) {
        return Status(Error::Code::INVALID_ARG, "callback: give one to Init or to the request");
    }
    return link->Forward(*inner, callback, validRequest);
}

Status InferenceEngine::GetProcessingRequest(uint64_t *num)
{
    if (num == nullptr) {
        return IsNull("num");
    }
    std::shared_ptr<Link> link;
    Held held(lock);
    link = inner_->Any();
    *num = link == nullptr ? 0 : link->NumRunning();
    return Status();
}

Status InferenceEngine::ControlRequest(const RequestId &requestId, Operation operation)
{
    if (operation != Operation::STOP) {
        return Status(Error::Code::INVALID_ARG,
            "operation: must be STOP, got " + std::to_string(static_cast<int>(operation)));
    }
    std::shared_ptr<Link> link;  /* let go without the lock */
    Held held(lock);
    link = inner_->Open();
    if (link == nullptr) {
        return NotReady();
    }
    return link->Stop(held, requestId);
}

Status InferenceEngine::Finalize()
{
    std::shared_ptr<Link> link;  /* let go without the lock */
    Held held(lock);
    link = inner_->Open();
    if (link == nullptr) {
        return NotReady();
    }
    if (link->IsCallbackThread()) {
        return Status(Error::Code::ERROR, "finalize cannot be called from a callback");
    }
    const Status status = link->Finish(held);
    held.unlock();
    link->Close();
    held.lock();
    inner_->link = nullptr;
    return status;
}

Status InferenceEngine::GetMaxBatchSize(uint64_t *batchSize)
{
    if (batchSize == nullptr) {
        return IsNull("batchSize");
    }
    std::shared_ptr<Link> link;  /* let go without the lock */
    Held held(lock);
    link = inner_->Open();
    if (link == nullptr) {
        return NotReady();
    }
    *batchSize = link->MaxBatch();
    return Status();
}

}
}
