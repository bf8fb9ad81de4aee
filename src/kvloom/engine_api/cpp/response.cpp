/* InferenceResponse and its outputs. */
#include "response.hpp"

#include <utility>

namespace kvloom {

IntegerOutput::IntegerOutput(const char *name, std::vector<int64_t> values)
    : name_(name), values_(std::move(values)), shape_{static_cast<int64_t>(values_.size())} {}

}

namespace llm {
namespace engine {

InferenceResponseInner::InferenceResponseInner(
    const RequestId &request_id, uint32_t end_flag, std::vector<int64_t> ids, const std::string &message)
    : id(request_id), flag(end_flag), error(message),
      end_attributes("IBIS_EOS_ATTR", {static_cast<int64_t>(end_flag), static_cast<int64_t>(ids.size())}),
      output_ids("OUTPUT_IDS", std::move(ids)) {}

InferenceResponse::InferenceResponse(std::unique_ptr<InferenceResponseInner> inner) : inner_(std::move(inner)) {}

InferenceResponse::~InferenceResponse() = default;

bool InferenceResponse::IsEOS() const
{
    return inner_->flag != INFER_RESPONSE_CONTINUE;
}

uint32_t InferenceResponse::GetFlags() const
{
    return inner_->flag;
}

Status InferenceResponse::ImmutableOutput(const std::string &name, Output **output)
{
    if (output == nullptr) {
        return Status(Error::Code::INVALID_ARG, "output: must not be NULL");
    }
    for (kvloom::IntegerOutput *found : {&inner_->output_ids, &inner_->end_attributes}) {
        if (name == found->Name()) {
            *output = found;
            return Status();
        }
    }
    *output = nullptr;
    return Status(Error::Code::NOT_FOUND, "no output '" + name + "'; there are OUTPUT_IDS, IBIS_EOS_ATTR");
}

RequestId InferenceResponse::GetRequestId() const
{
    return inner_->id;
}

const std::string &InferenceResponse::ErrorMsg() const
{
    return inner_->error;
}

}
}
