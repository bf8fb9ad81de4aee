/* Inputs and requests as the library holds them. */
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

/* Everything but the name and the callback, which stay here. */
void PackRequest(const llm::engine::InferenceRequestInner &request, Packer *packer);

}

#endif
