/* The library's representation of a response. */
#ifndef KVLOOM_RESPONSE_HPP
#define KVLOOM_RESPONSE_HPP

#include <string>
#include <vector>

#include "kvloom_engine/infer_response.h"

namespace kvloom {

/* An output of int64 values. */
class IntegerOutput : public llm::engine::InferenceResponse::Output {
public:
    IntegerOutput(const char *name, std::vector<int64_t> values);

    const char *Name() const noexcept override { return name_; }
    LLM_ENGINE_DataType DType() const noexcept override { return TYPE_INT64; }
    const std::vector<int64_t> &Shape() const noexcept override { return shape_; }
    uint64_t DimCount() const noexcept override { return shape_.size(); }
    void *Buffer() noexcept override { return values_.data(); }
    const void *Buffer() const noexcept override { return values_.data(); }
    uint64_t ByteSize() const noexcept override { return values_.size() * sizeof(int64_t); }

private:
    const char *name_;
    std::vector<int64_t> values_, shape_;
};

}

namespace llm {
namespace engine {

struct InferenceResponseInner {
    InferenceResponseInner(
        const RequestId &request_id, uint32_t end_flag, std::vector<int64_t> ids, const std::string &message);

    RequestId id;
    uint32_t flag;
    std::string error;
    kvloom::IntegerOutput end_attributes, output_ids;
};

}
}

#endif
