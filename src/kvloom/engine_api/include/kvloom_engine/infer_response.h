/* A response: the output of one step for one request (spec 3.3.1.2.5 and 3.3.1.2.6). */
#ifndef KVLOOM_INFER_RESPONSE_H
#define KVLOOM_INFER_RESPONSE_H

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "infer_status.h"
#include "infer_types.h"

namespace llm {
namespace engine {

struct InferenceResponseInner;

/* Only the engine creates responses. */
class InferenceResponse {
public:
    /* An output tensor; valid as long as its response. */
    class Output {
    public:
        virtual ~Output() = default;
        virtual const char *Name() const noexcept = 0;
        virtual LLM_ENGINE_DataType DType() const noexcept = 0;
        virtual const std::vector<int64_t> &Shape() const noexcept = 0;
        virtual uint64_t DimCount() const noexcept = 0;
        virtual void *Buffer() noexcept = 0;
        virtual const void *Buffer() const noexcept = 0;
        virtual uint64_t ByteSize() const noexcept = 0;
    };

    explicit InferenceResponse(std::unique_ptr<InferenceResponseInner> inner);
    InferenceResponse(const InferenceResponse &) = delete;
    InferenceResponse &operator = (const InferenceResponse &) = delete;
    ~InferenceResponse();

    bool IsEOS() const;         /* whether this is the request's last response, however it ended */
    uint32_t GetFlags() const;  /* an InferResponseEndFlag */

    /* OUTPUT_IDS: int64, the step's tokens. IBIS_EOS_ATTR: int64, the flag and the number of tokens. Others: NOT_FOUND.
       */
    Status ImmutableOutput(const std::string &name, Output **output);

    RequestId GetRequestId() const;

    const std::string &ErrorMsg() const;  /* not empty with EXEC_ERROR and ILLEGAL_INPUT; not in the document */

private:
    std::unique_ptr<InferenceResponseInner> inner_;
};

using SendResponseCallback = std::function<void(std::shared_ptr<InferenceResponse> &)>;

}
}

#endif
