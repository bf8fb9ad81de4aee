/* Enums, names of requests and sampling parameters of the Engine API (spec 3.3.1.1 and 3.3.1.2.4). */
#ifndef KVLOOM_INFER_TYPES_H
#define KVLOOM_INFER_TYPES_H

#include <cstdint>
#include <functional>
#include <string>

typedef enum LLMENGINE_memorytype_enum {
    LLMENGINE_MEMORY_CPU,
    LLMENGINE_MEMORY_CPU_PINNED,
    LLMENGINE_MEMORY_GPU
} LLM_ENGINE_MemoryType;

/* The type of a tensor's elements. */
typedef enum LLM_ENGINE_DataType_enum {
    TYPE_INVALID = 0,
    TYPE_BOOL = 1,
    TYPE_UINT8 = 2,
    TYPE_UINT16 = 3,
    TYPE_UINT32 = 4,
    TYPE_UINT64 = 5,
    TYPE_INT8 = 6,
    TYPE_INT16 = 7,
    TYPE_INT32 = 8,
    TYPE_INT64 = 9,
    TYPE_FP16 = 10,
    TYPE_FP32 = 11,
    TYPE_FP64 = 12,
    TYPE_STRING = 13,
    TYPE_BF16 = 14,
    TYPE_BUTT
} LLM_ENGINE_DataType;

typedef enum LLM_ENGINE_parametertype_enum {
    LLM_ENGINE_PARAMETER_STRING,
    LLM_ENGINE_PARAMETER_INT,
    LLM_ENGINE_PARAMETER_BOOL,
    LLM_ENGINE_PARAMETER_BYTES
} LLM_ENGINE_ParameterType;

/* Whether a request continues, or how it ended. Only its last response has a flag other than CONTINUE. */
typedef enum InferResponseEndFlagEnum {
    INFER_RESPONSE_CONTINUE = 0,
    INFER_RESPONSE_EOS = 1,
    INFER_RESPONSE_CANCEL = 2,         /* stopped by ControlRequest */
    INFER_RESPONSE_EXEC_ERROR = 3,     /* the engine failed; ErrorMsg says how */
    INFER_RESPONSE_ILLEGAL_INPUT = 4,  /* the request can never run; ErrorMsg says why */
    INFER_RESPONSE_REACH_MAX_SEQ_LEN = 5,
    INFER_RESPONSE_REACH_MAX_OUTPUT_LEN = 6
} InferResponseEndFlag;

namespace llm {
namespace engine {

/* What ControlRequest does to a running request. */
enum class Operation {
    STOP = 1
};

/* How tokens are chosen. doSample false = greedy, whatever the other fields are; seed 0 = the engine draws a seed. */
struct SamplingParams {
    float temperature = 1.0F;
    uint32_t topK = 0;       /* 0: all tokens */
    float topP = 1.0F;       /* above 0; 1: off */
    float typicalP = 1.0F;   /* above 0; 1: off */
    bool doSample = false;
    uint32_t seed = 0;
    float repetitionPenalty = 1.0F;
    bool watermark = false;
    float frequencyPenalty = 0.0F;
    float presencePenalty = 0.0F;
};

/* The id of a request: a text of any bytes, or a number. The number 1 and the text "1" are different ids. */
class RequestId {
public:
    enum class DataType {
        UINT64,
        STRING
    };

    RequestId(const std::string &request_label);
    RequestId(uint64_t request_index);
    RequestId(const llm::engine::RequestId &other);
    RequestId &operator = (const uint64_t rhs);
    RequestId &operator = (const std::string &rhs);
    RequestId &operator = (const RequestId &rhs);

    DataType Type() const;
    const std::string &StringValue() const;  /* "" if it is a number */
    uint64_t UnsignedIntValue() const;       /* 0 if it is a text */

private:
    DataType type_;
    uint64_t index_;
    std::string label_;
};

/* A strict order of ids, for std::map: numbers by value, then texts by hash, and by value if hashes are equal. */
struct Compare {
    bool operator () (const RequestId &lhs, const RequestId &rhs) const
    {
        if (lhs.Type() != rhs.Type()) {
            return lhs.Type() == RequestId::DataType::UINT64;
        }
        if (lhs.Type() == RequestId::DataType::UINT64) {
            return lhs.UnsignedIntValue() < rhs.UnsignedIntValue();
        }
        const std::size_t left = std::hash<std::string>()(lhs.StringValue());
        const std::size_t right = std::hash<std::string>()(rhs.StringValue());
        return left != right ? left < right : lhs.StringValue() < rhs.StringValue();
    }
};

}
}

#endif
