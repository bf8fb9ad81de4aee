/* Codes, statuses, names, tensors and requests: what needs no engine. */
#include <set>
#include <stdexcept>

#include "check.hpp"

static void CheckStatuses()
{
    using infrastructure::Error;
    CHECK(Error().IsOk() && Error().ErrorCode() == Error::Code::OK);
    const Error error(Error::Code::ERROR, "no such model");
    CHECK(!error.IsOk() && error.Message() == "no such model" && error.ToString() == "Error: no such model");
    CHECK(std::string(Error::CodeToString(Error::Code::OK)) == "OK:");
    CHECK(std::string(Error::CodeToString(Error::Code::INVALID)) == "Invalid argument:");
    CHECK(std::string(Error::CodeToString(Error::Code::NOT_FOUND)) == "Not found:");
    CHECK(Status().IsOk() && Status(Error::Code::OK, "Success").StatusMsg() == "Success");
    CHECK_STATUS(Status(error), ERROR, "no such model");
    CHECK_STATUS(Status(new Error(Error::Code::NOT_FOUND, "gone")), NOT_FOUND, "gone");
    CHECK_OK(Status(static_cast<Error *>(nullptr)));
}

static void CheckNames()
{
    RequestId text("a"), number(7);
    CHECK(text.Type() == RequestId::DataType::STRING && text.StringValue() == "a" && text.UnsignedIntValue() == 0);
    CHECK(number.Type() == RequestId::DataType::UINT64 && number.StringValue().empty());
    CHECK(number.UnsignedIntValue() == 7 && RequestId(0).UnsignedIntValue() == 0);
    llm::engine::RequestId copy(text);
    CHECK(copy.StringValue() == "a");
    copy = number;
    CHECK(copy.UnsignedIntValue() == 7);
    copy = std::string("b");
    CHECK(copy.StringValue() == "b" && copy.UnsignedIntValue() == 0);
    copy = static_cast<uint64_t>(9);
    CHECK(copy.UnsignedIntValue() == 9 && copy.StringValue().empty());

    std::set<RequestId, Compare> names;
    for (uint64_t index = 0; index < 100; index++) {
        names.insert(RequestId(index));
        names.insert(RequestId(std::to_string(index)));
        names.insert(RequestId(index));
    }
    CHECK(names.size() == 200 && names.begin()->UnsignedIntValue() == 0);
    CHECK(Compare()(RequestId(1), RequestId(2)) && !Compare()(RequestId(2), RequestId(1)));
}

static void CheckInputs()
{
    const int64_t shape[] = {2, 3}, bad_shape[] = {2, 0}, huge[] = {INT64_MAX, INT64_MAX};
    Input input("x", TYPE_FP32, shape, 2);
    CHECK(input.Name() == "x" && input.DType() == TYPE_FP32 && input.DimCount() == 2);
    CHECK(input.Shape() == std::vector<int64_t>({2, 3}) && input.Buffer() == nullptr && input.ByteSize() == 0);
    CHECK_STATUS(input.Allocate(23), INVALID_ARG, "x of shape [2, 3] needs 24 bytes, got 23");
    CHECK_STATUS(input.Allocate(0), INVALID_ARG, "needs 24 bytes");
    CHECK_OK(input.Allocate(6 * sizeof(float)));
    CHECK(input.ByteSize() == 24 && static_cast<float *>(input.Buffer())[5] == 0.0F);
    CHECK(input.GetInputInner() != nullptr);
    Input text("t", TYPE_STRING, shape, 1);
    CHECK_OK(text.Allocate(100));
    CHECK_STATUS(Input("h", TYPE_INT64, huge, 2).Allocate(8), INVALID_ARG, "h of shape");
    const int64_t large[] = {INT64_MAX, 2};
    CHECK_STATUS(Input("l", TYPE_INT8, large, 2).Allocate(2 * static_cast<size_t>(INT64_MAX)), ERROR, "no memory");
    int num_thrown = 0;
    for (const LLM_ENGINE_DataType type : {TYPE_INVALID, TYPE_BUTT, TYPE_BF16}) {
        try {
            Input wrong(type == TYPE_BF16 ? "" : "x", type, shape, 2);
        } catch (const std::invalid_argument &) {
            num_thrown++;
        }
    }
    CHECK(num_thrown == 3);

    InferenceRequest request(RequestId("r"));
    Input *made = nullptr, *again = nullptr;
    CHECK_OK(request.AddOriginalInput(TYPE_INT64, shape, 2, &made));
    CHECK(made->Name() == "INPUT_IDS");
    CHECK_STATUS(request.AddOriginalInput(TYPE_INT64, shape, 2, &again), INVALID_ARG, "INPUT_IDS");
    CHECK_STATUS(request.AddOriginalInput("y", TYPE_INT64, bad_shape, 2, &again), INVALID_ARG, "[2, 0]");
    CHECK_STATUS(request.AddOriginalInput("y", TYPE_INT64, nullptr, 2, &again), INVALID_ARG, "shape");
    CHECK_STATUS(request.AddOriginalInput("y", TYPE_INT64, shape, 0, &again), INVALID_ARG, "shape");
    CHECK_STATUS(request.AddOriginalInput("y", TYPE_INVALID, shape, 2, &again), INVALID_ARG, "datatype");
    CHECK_STATUS(request.AddOriginalInput("", TYPE_INT64, shape, 2, &again), INVALID_ARG, "name");
    CHECK_STATUS(request.AddOriginalInput("y", TYPE_INT64, shape, 2, nullptr), INVALID_ARG, "input");
    CHECK(again == nullptr);
    CHECK_OK(request.AddOriginalInput("y", TYPE_BF16, shape, 2, &again));
    CHECK_OK(request.RemoveOriginalInput("y"));
    CHECK_STATUS(request.RemoveOriginalInput("y"), NOT_FOUND, "y");
}

static void CheckRequests()
{
    InferenceRequest request(RequestId("r"));
    CHECK(request.GetRequestId().StringValue() == "r" && request.GetRequestInner() != nullptr);
    CHECK(request.MaxOutputLen() == 0 && !request.SetMaxOutputLen(0) && request.SetMaxOutputLen(UINT32_MAX));
    CHECK(request.MaxOutputLen() == UINT32_MAX);
    CHECK(!request.HasSampling() && !request.GetSamplingParams().doSample);
    llm::engine::SamplingParams params;
    params.temperature = 0.5F;
    params.topK = 3;
    request.SetSamplingParams(params);
    CHECK(request.HasSampling() && request.GetSamplingParams().topK == 3);
    std::string text = "hello";
    CHECK(!request.IsInputText() && request.GetInputText().empty());
    request.SetInputText(text);
    CHECK(request.IsInputText() && request.GetInputText() == "hello");
}

int main()
{
    CheckStatuses();
    CheckNames();
    CheckInputs();
    CheckRequests();
    static_assert(LLMENGINE_MEMORY_GPU == 2 && LLM_ENGINE_PARAMETER_BYTES == 3 && TYPE_BUTT == 15, "the document's");
    return 0;
}
