/* The library's representation of inputs and requests. */
#ifndef KVLOOM_REQUEST_HPP
#define KVLOOM_REQUEST_HPP

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kvloom_engine/infer_request.h"
#include "wire.hpp"

namespace llm {
namespace engine {

struct InputInner {
    std::string name;
    LLM_ENGINE_DataType datatype;
    std::vector<int64_t> shape;
    uint64_t dim_count;
    std::vector<unsigned char> bytes;  /* empty before Allocate */
};

struct InferenceRequestInner {
    explicit InferenceRequestInner(const RequestId &request_id) : id(request_id) {}

    RequestId id;
    std::map<std::string, std::unique_ptr<Input>> inputs;
    std::string text;
    bool is_text = false;
    SamplingParams sampling;
    bool has_sampling = false;
    uint32_t max_output_len = 0;  /* 0: not set */
    SendResponseCallback callback;
};

}
}

namespace kvloom {

/* Appends a request's fields to a message, without its id and callback, which the host does not get. */
void PackRequest(const llm::engine::InferenceRequestInner &request, Packer *packer);

}

#endif
