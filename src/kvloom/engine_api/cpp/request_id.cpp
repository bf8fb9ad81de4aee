/* RequestId. */
#include "kvloom_engine/infer_types.h"

namespace llm {
namespace engine {

RequestId::RequestId(const std::string &request_label) : type_(DataType::STRING), index_(0), label_(request_label) {}

RequestId::RequestId(uint64_t request_index) : type_(DataType::UINT64), index_(request_index) {}

RequestId::RequestId(const RequestId &other) = default;

RequestId &RequestId::operator = (const RequestId &rhs) = default;

RequestId &RequestId::operator = (const uint64_t rhs)
{
    return *this = RequestId(rhs);
}

RequestId &RequestId::operator = (const std::string &rhs)
{
    return *this = RequestId(rhs);
}

RequestId::DataType RequestId::Type() const
{
    return type_;
}

const std::string &RequestId::StringValue() const
{
    return label_;
}

uint64_t RequestId::UnsignedIntValue() const
{
    return index_;
}

}
}
