/* A request: a prompt, as token ids or as text, and its parameters (spec 3.3.1.2.2 and 3.3.1.2.3). */
#ifndef KVLOOM_INFER_REQUEST_H
#define KVLOOM_INFER_REQUEST_H

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "infer_response.h"
#include "infer_status.h"
#include "infer_types.h"

namespace llm {
namespace engine {

struct InputInner;             /* the library's representation of a tensor */
struct InferenceRequestInner;  /* the library's representation of a request */

/* A tensor: a buffer with a name, a type and a shape. */
class Input {
public:
    /* shape: `dim_count` sizes of at least 1. Throws std::invalid_argument with a message that names the invalid
       argument. */
    Input(const std::string &name, const LLM_ENGINE_DataType datatype, const int64_t *shape, const uint64_t dim_count);
    Input() = delete;
    Input(const Input &) = delete;
    Input &operator = (const Input &) = delete;
    ~Input();

    /* Allocates a zeroed buffer of `size` bytes: what the shape needs, or any number for TYPE_STRING. Frees an earlier
       one. */
    Status Allocate(size_t size);

    const std::string &Name() const;
    LLM_ENGINE_DataType DType() const;
    const std::vector<int64_t> &Shape() const;
    const uint64_t &DimCount() const;
    void *Buffer();             /* NULL before Allocate; valid as long as this object, or until Allocate is called again
                                   */
    uint64_t ByteSize() const;  /* bytes of the buffer */
    std::shared_ptr<InputInner> GetInputInner() const;

private:
    std::shared_ptr<InputInner> inner_;
};

/* A request. Forward copies it: afterwards it may be changed, used again or destroyed. Not thread-safe. */
class InferenceRequest {
public:
    InferenceRequest(const RequestId &reqId);
    InferenceRequest() = delete;
    InferenceRequest(const InferenceRequest &) = delete;
    InferenceRequest &operator = (const InferenceRequest &) = delete;
    ~InferenceRequest();

    /*
     * Adds an input, which the caller allocates and fills; its name is INPUT_IDS if none is given. The request owns it
     * until RemoveOriginalInput. INVALID_ARG if an input of that name exists or an argument is invalid.
     */
    Status AddOriginalInput(
        const LLM_ENGINE_DataType datatype, const int64_t *shape, const uint64_t dim_count, Input **input);
    Status AddOriginalInput(const std::string &name, const LLM_ENGINE_DataType datatype, const int64_t *shape,
        const uint64_t dim_count, Input **input);
    Status RemoveOriginalInput(const std::string &name);

    uint32_t MaxOutputLen() const;                 /* tokens; 0 = not set, only the engine's limits apply */
    bool SetMaxOutputLen(uint32_t max_output_len); /* 0 is refused: returns false and changes nothing */

    RequestId &GetRequestId();

    SamplingParams GetSamplingParams() const;      /* those that were set, else greedy ones */
    void SetSamplingParams(SamplingParams samplingParams);
    bool HasSampling();

    void SetSendResponseCallback(const SendResponseCallback &callback);  /* replaces the engine's for this request */

    void SetInputText(const std::string &text);    /* UTF-8 */
    std::string &GetInputText();
    bool IsInputText();

    std::shared_ptr<InferenceRequestInner> GetRequestInner() const;

private:
    std::shared_ptr<InferenceRequestInner> inner_;
};

}
}

#endif
