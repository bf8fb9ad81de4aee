/* Input and InferenceRequest. The engine checks prompts; here only the form of tensors is checked. */
#include "request.hpp"

#include <cstdint>
#include <new>
#include <stdexcept>

namespace llm {
namespace engine {

/* Bytes of an element of a type: 1 for TYPE_STRING, 0 for an unknown type. */
static size_t ItemSize(LLM_ENGINE_DataType datatype)
{
    switch (datatype) {
        case TYPE_BOOL:
        case TYPE_UINT8:
        case TYPE_INT8:
        case TYPE_STRING:
            return 1;
        case TYPE_UINT16:
        case TYPE_INT16:
        case TYPE_FP16:
        case TYPE_BF16:
            return 2;
        case TYPE_UINT32:
        case TYPE_INT32:
        case TYPE_FP32:
            return 4;
        case TYPE_UINT64:
        case TYPE_INT64:
        case TYPE_FP64:
            return 8;
        default:
            return 0;
    }
}

/* The shape as text, such as "[1, 4]". */
static std::string ShapeText(const std::vector<int64_t> &shape)
{
    std::string text;
    for (const int64_t size : shape) {
        text += (text.empty() ? "" : ", ") + std::to_string(size);
    }
    return "[" + text + "]";
}

/* Bytes that the shape needs; SIZE_MAX if the number overflows. */
static size_t NeededBytes(const InputInner &input)
{
    size_t bytes = ItemSize(input.datatype);
    for (const int64_t size : input.shape) {
        if (__builtin_mul_overflow(bytes, static_cast<size_t>(size), &bytes)) {
            return SIZE_MAX;
        }
    }
    return bytes;
}

Input::Input(
    const std::string &name, const LLM_ENGINE_DataType datatype, const int64_t *shape, const uint64_t dim_count)
    : inner_(std::make_shared<InputInner>())
{
    if (name.empty()) {
        throw std::invalid_argument("name: must not be empty");
    }
    if (ItemSize(datatype) == 0) {
        throw std::invalid_argument(
            "datatype: must be one of TYPE_BOOL to TYPE_BF16, got " + std::to_string(static_cast<int>(datatype)));
    }
    constexpr uint64_t MAX_DIMENSIONS = 32;  /* as many as the engine's arrays have */
    if (shape == nullptr || dim_count < 1 || dim_count > MAX_DIMENSIONS) {
        throw std::invalid_argument("shape: must be 1 to 32 sizes, got " + std::to_string(shape ? dim_count : 0));
    }
    *inner_ = InputInner{name, datatype, {shape, shape + dim_count}, dim_count, {}};
    for (const int64_t size : inner_->shape) {
        if (size < 1) {
            throw std::invalid_argument("shape: must be sizes of at least 1, got " + ShapeText(inner_->shape));
        }
    }
}

Input::~Input() = default;

Status Input::Allocate(size_t size)
{
    const size_t needed = NeededBytes(*inner_);
    if (size < 1 || (size != needed && inner_->datatype != TYPE_STRING)) {
        return Status(Error::Code::INVALID_ARG, "size: " + inner_->name + " of shape " + ShapeText(inner_->shape) +
            " needs " + std::to_string(needed) + " bytes, got " + std::to_string(size));
    }
    try {
        inner_->bytes = std::vector<unsigned char>(size);
    } catch (const std::exception &) {
        return Status(Error::Code::ERROR, "size: no memory for " + std::to_string(size) + " bytes");
    }
    return Status();
}

const std::string &Input::Name() const
{
    return inner_->name;
}

LLM_ENGINE_DataType Input::DType() const
{
    return inner_->datatype;
}

const std::vector<int64_t> &Input::Shape() const
{
    return inner_->shape;
}

const uint64_t &Input::DimCount() const
{
    return inner_->dim_count;
}

void *Input::Buffer()
{
    return inner_->bytes.empty() ? nullptr : inner_->bytes.data();
}

uint64_t Input::ByteSize() const
{
    return inner_->bytes.size();
}

std::shared_ptr<InputInner> Input::GetInputInner() const
{
    return inner_;
}

InferenceRequest::InferenceRequest(const RequestId &reqId) : inner_(std::make_shared<InferenceRequestInner>(reqId)) {}

InferenceRequest::~InferenceRequest() = default;

Status InferenceRequest::AddOriginalInput(
    const LLM_ENGINE_DataType datatype, const int64_t *shape, const uint64_t dim_count, Input **input)
{
    return AddOriginalInput("INPUT_IDS", datatype, shape, dim_count, input);
}

Status InferenceRequest::AddOriginalInput(const std::string &name, const LLM_ENGINE_DataType datatype,
    const int64_t *shape, const uint64_t dim_count, Input **input)
{
    if (input == nullptr) {
        return Status(Error::Code::INVALID_ARG, "input: must not be NULL");
    }
    if (inner_->inputs.count(name) != 0) {
        return Status(Error::Code::INVALID_ARG, "input '" + name + "' is there already");
    }
    try {
        auto made = std::unique_ptr<Input>(new Input(name, datatype, shape, dim_count));
        *input = made.get();
        inner_->inputs[name] = std::move(made);
    } catch (const std::invalid_argument &error) {
        return Status(Error::Code::INVALID_ARG, error.what());
    }
    return Status();
}

Status InferenceRequest::RemoveOriginalInput(const std::string &name)
{
    if (inner_->inputs.erase(name) == 0) {
        return Status(Error::Code::NOT_FOUND, "no input '" + name + "'");
    }
    return Status();
}

uint32_t InferenceRequest::MaxOutputLen() const
{
    return inner_->max_output_len;
}

bool InferenceRequest::SetMaxOutputLen(uint32_t max_output_len)
{
    if (max_output_len == 0) {
        return false;
    }
    inner_->max_output_len = max_output_len;
    return true;
}

RequestId &InferenceRequest::GetRequestId()
{
    return inner_->id;
}

SamplingParams InferenceRequest::GetSamplingParams() const
{
    return inner_->sampling;
}

void InferenceRequest::SetSamplingParams(SamplingParams samplingParams)
{
    inner_->sampling = samplingParams;
    inner_->has_sampling = true;
}

bool InferenceRequest::HasSampling()
{
    return inner_->has_sampling;
}

void InferenceRequest::SetSendResponseCallback(const SendResponseCallback &callback)
{
    inner_->callback = callback;
}

void InferenceRequest::SetInputText(const std::string &text)
{
    inner_->text = text;
    inner_->is_text = true;
}

std::string &InferenceRequest::GetInputText()
{
    return inner_->text;
}

bool InferenceRequest::IsInputText()
{
    return inner_->is_text;
}

std::shared_ptr<InferenceRequestInner> InferenceRequest::GetRequestInner() const
{
    return inner_;
}

}
}

namespace kvloom {

using llm::engine::InputInner;

void PackRequest(const llm::engine::InferenceRequestInner &request, Packer *packer)
{
    const auto &sampling = request.sampling;
    packer->Put(request.max_output_len).Put(request.has_sampling);
    packer->Put(sampling.temperature).Put(sampling.topK).Put(sampling.topP).Put(sampling.typicalP);
    packer->Put(sampling.doSample).Put(sampling.seed).Put(sampling.repetitionPenalty).Put(sampling.watermark);
    packer->Put(sampling.frequencyPenalty).Put(sampling.presencePenalty);
    packer->Put(request.is_text).PutText(request.text);
    packer->Put(static_cast<uint32_t>(request.inputs.size()));
    for (const auto &named : request.inputs) {
        const std::shared_ptr<InputInner> input = named.second->GetInputInner();
        packer->PutText(input->name).Put(static_cast<uint8_t>(input->datatype));
        packer->PutText(input->shape.data(), input->shape.size() * sizeof(int64_t));
        packer->PutText(input->bytes.data(), input->bytes.size());
    }
}

}
