/* A prompt, as token ids or as text, and how to answer it (spec 3.3.1.2.2 and 3.3.1.2.3). */
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

struct InputInner;             /* the tensor as the library holds it */
struct InferenceRequestInner;  /* likewise, the request */

/* A named, typed, shaped buffer. */
class Input {
public:
    /* `shape` has `dim_count` sizes of at least 1. Throws std::invalid_argument, which names what is wrong. */
    Input(const std::string &name, const LLM_ENGINE_DataType datatype, const int64_t *shape, const uint64_t dim_count);
    Input() = delete;
    Input(const Input &) = delete;
    Input &operator = (const Input &) = delete;
    ~Input();

    /* Makes a buffer of `size` bytes, all zero: what the shape needs; for TYPE_STRING any number. Frees the one before. */
    Status Allocate(size_t size);

    const std::string &Name() const;
    LLM_ENGINE_DataType DType() const;
    const std::vector<int64_t> &Shape() const;
    const uint64_t &DimCount() const;
    void *Buffer();             /* NULL before Allocate; lives as long as this */
    uint64_t ByteSize() const;  /* of the buffer */
    std::shared_ptr<InputInner> GetInputInner() const;

private:
    std::shared_ptr<InputInner> inner_;
};

/* Forward takes a copy: afterwards it may be changed, used again or dropped. One thread at a time. */
class InferenceRequest {
public:
    InferenceRequest(const RequestId &reqId);
    InferenceRequest() = delete;
    InferenceRequest(const InferenceRequest &) = delete;
    InferenceRequest &operator = (const InferenceRequest &) = delete;
    ~InferenceRequest();

    /*
     * A new input, to be allocated and filled; its name is INPUT_IDS where none is given. The request owns it, until
     * RemoveOriginalInput. INVALID_ARG when there is one of that name, or says what is wrong.
     */
    Status AddOriginalInput(
        const LLM_ENGINE_DataType datatype, const int64_t *shape, const uint64_t dim_count, Input **input);
    Status AddOriginalInput(const std::string &name, const LLM_ENGINE_DataType datatype, const int64_t *shape,
        const uint64_t dim_count, Input **input);
    Status RemoveOriginalInput(const std::string &name);

    uint32_t MaxOutputLen() const;                 /* tokens; 0: only the engine's limits count */
    bool SetMaxOutputLen(uint32_t max_output_len); /* false, and nothing changes, for 0 */

    RequestId &GetRequestId();

    SamplingParams GetSamplingParams() const;      /* what was set, else greedy */
    void SetSamplingParams(SamplingParams samplingParams);
    bool HasSampling();

    void SetSendResponseCallback(const SendResponseCallback &callback);  /* in place of the engine's */

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
