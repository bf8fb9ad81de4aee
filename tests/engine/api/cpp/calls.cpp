/* An engine with the mock model: what calls answer, and how requests end. calls CONFIG */
#include "check.hpp"

static void CheckUninitialised(InferenceEngine &engine)
{
    uint64_t number = 1;
    auto request = MakeRequest(RequestId(1), NEVER_EOS);
    CHECK_STATUS(engine.Forward(request), ERROR, "the engine is not initialised");
    CHECK_STATUS(engine.GetMaxBatchSize(&number), ERROR, "the engine is not initialised");
    CHECK_STATUS(engine.GetRequestBlockQuotas(&number, &number, &number), ERROR, "the engine is not initialised");
    CHECK_STATUS(engine.ControlRequest(RequestId(1), Operation::STOP), ERROR, "the engine is not initialised");
    CHECK_STATUS(engine.Finalize(), ERROR, "the engine is not initialised");
    CHECK_OK(engine.GetProcessingRequest(&number));
    CHECK(number == 0);
}

static void CheckNulls(InferenceEngine &engine)
{
    uint64_t number = 0;
    std::shared_ptr<InferenceRequest> none;
    CHECK_STATUS(engine.Forward(none), INVALID_ARG, "request: must not be NULL");
    CHECK_STATUS(engine.GetMaxBatchSize(nullptr), INVALID_ARG, "batchSize");
    CHECK_STATUS(engine.GetProcessingRequest(nullptr), INVALID_ARG, "num");
    CHECK_STATUS(engine.GetRequestBlockQuotas(&number, nullptr, &number), INVALID_ARG, "remainPrefillSlots");
    CHECK_STATUS(engine.ControlRequest(RequestId(1), static_cast<Operation>(2)), INVALID_ARG, "must be STOP, got 2");
}

static void CheckAnswers(InferenceEngine &engine, Inbox &inbox)
{
    auto request = MakeRequest(RequestId(7), NEVER_EOS, 5);
    CHECK_OK(engine.Forward(request));
    const Inbox::Mail mail = inbox.Wait("7");
    CHECK(mail.ids.size() == 5 && mail.num_responses == 5);
    CHECK(mail.flag == INFER_RESPONSE_REACH_MAX_OUTPUT_LEN && mail.error.empty());

    inbox.Clear();
    auto text = std::make_shared<InferenceRequest>(RequestId(std::string("bytes \xff\0 too", 12)));
    text->SetInputText("hi");
    text->SetMaxOutputLen(4);
    SamplingParams sampling;
    sampling.doSample = true;
    sampling.seed = 5;
    text->SetSamplingParams(sampling);
    CHECK_OK(engine.Forward(text, true));
    const std::vector<int64_t> first = inbox.Wait(std::string("bytes \xff\0 too", 12)).ids;
    CHECK(first.size() == 4);

    Inbox own;
    text->GetRequestId() = uint64_t{8};
    text->SetSendResponseCallback(own.Callback());
    CHECK_OK(engine.Forward(text));
    text.reset();
    CHECK(own.Wait("8").ids == first);
    inbox.Clear();
}

/* Every integer type carries token ids. */
template <typename Integer> static std::vector<int64_t> AnswerTo(
    InferenceEngine &engine, Inbox &inbox, LLM_ENGINE_DataType type)
{
    auto request = std::make_shared<InferenceRequest>(RequestId("typed"));
    const int64_t shape[] = {3};
    Input *input = nullptr;
    CHECK_OK(request->AddOriginalInput("INPUT_IDS", type, shape, 1, &input));
    CHECK_OK(input->Allocate(3 * sizeof(Integer)));
    for (int index = 0; index < 3; index++) {
        static_cast<Integer *>(input->Buffer())[index] = static_cast<Integer>(NEVER_EOS[static_cast<size_t>(index)]);
    }
    request->SetMaxOutputLen(6);
    CHECK_OK(engine.Forward(request, true));
    const std::vector<int64_t> ids = inbox.Wait("typed").ids;
    inbox.Clear();
    return ids;
}

static void CheckTypes(InferenceEngine &engine, Inbox &inbox)
{
    const std::vector<int64_t> wanted = AnswerTo<int64_t>(engine, inbox, TYPE_INT64);
    CHECK(AnswerTo<uint8_t>(engine, inbox, TYPE_UINT8) == wanted);
    CHECK(AnswerTo<uint16_t>(engine, inbox, TYPE_UINT16) == wanted);
    CHECK(AnswerTo<uint32_t>(engine, inbox, TYPE_UINT32) == wanted);
    CHECK(AnswerTo<uint64_t>(engine, inbox, TYPE_UINT64) == wanted);
    CHECK(AnswerTo<int8_t>(engine, inbox, TYPE_INT8) == wanted);
    CHECK(AnswerTo<int16_t>(engine, inbox, TYPE_INT16) == wanted);
    CHECK(AnswerTo<int32_t>(engine, inbox, TYPE_INT32) == wanted);
}

static void CheckRefusals(InferenceEngine &engine, Inbox &inbox)
{
    auto bad = MakeRequest(RequestId("bad"), {1000000});
    CHECK_STATUS(engine.Forward(bad, true), INVALID_ARG, "token id 1000000 is outside the vocabulary");
    CHECK_OK(engine.Forward(bad));
    const Inbox::Mail mail = inbox.Wait("bad");
    CHECK(mail.flag == INFER_RESPONSE_ILLEGAL_INPUT && mail.ids.empty());
    CHECK(mail.error.find("vocabulary") != std::string::npos);

    auto empty = std::make_shared<InferenceRequest>(RequestId("empty"));
    CHECK_STATUS(engine.Forward(empty), INVALID_ARG, "INPUT_IDS: is missing");
    const int64_t shape[] = {3};
    Input *input = nullptr;
    CHECK_OK(empty->AddOriginalInput("attention_mask", TYPE_INT64, shape, 1, &input));
    CHECK_STATUS(engine.Forward(empty), INVALID_ARG, "attention_mask: is not an input of the engine");
    auto floats = std::make_shared<InferenceRequest>(RequestId("floats"));
    CHECK_OK(floats->AddOriginalInput(TYPE_FP32, shape, 1, &input));
    CHECK_STATUS(engine.Forward(floats), INVALID_ARG, "INPUT_IDS: is missing");
    CHECK_OK(input->Allocate(12));
    CHECK_STATUS(engine.Forward(floats), INVALID_ARG, "must hold integers, got TYPE_FP32");
    auto both = MakeRequest(RequestId("both"), NEVER_EOS);
    both->SetInputText("x");
    CHECK_STATUS(engine.Forward(both), INVALID_ARG, "both given");
    auto broken = std::make_shared<InferenceRequest>(RequestId("broken"));
    broken->SetInputText("ab\xff");
    CHECK_STATUS(engine.Forward(broken), INVALID_ARG, "input_text: is not UTF-8 at byte 2");
    broken->SetInputText(std::string((64U << 20U) + 1, 'x'));
    CHECK_STATUS(engine.Forward(broken), INVALID_ARG, "larger than 64 MiB");
    auto cold = MakeRequest(RequestId("cold"), NEVER_EOS);
    SamplingParams sampling;
    sampling.doSample = true;
    sampling.temperature = -1.0F;
    cold->SetSamplingParams(sampling);
    CHECK_STATUS(engine.Forward(cold), INVALID_ARG, "temperature");
    uint64_t number = 1;
    CHECK_OK(engine.GetProcessingRequest(&number));
    CHECK(number == 0);
    inbox.Clear();
}

static void CheckStops(InferenceEngine &engine, Inbox &inbox)
{
    for (int round = 0; round < 20; round++) {
        auto request = MakeRequest(RequestId("long"), NEVER_EOS);
        CHECK_OK(engine.Forward(request));
        CHECK_STATUS(engine.Forward(request), INVALID_ARG, "request_id: 'long' is in use");
        CHECK_OK(engine.ControlRequest(request->GetRequestId(), Operation::STOP));
        CHECK(inbox.Wait("long").flag == INFER_RESPONSE_CANCEL);
        inbox.Clear();
    }
    CHECK_STATUS(engine.ControlRequest(RequestId("long"), Operation::STOP), NOT_FOUND, "no running request 'long'");
    CHECK_STATUS(engine.ControlRequest(RequestId(1), Operation::STOP), NOT_FOUND, "no running request 1");
}

static void CheckQuotas(InferenceEngine &engine, Inbox &inbox)
{
    uint64_t batch = 0, blocks = 0, slots = 0, tokens = 0, fewer = 0, running = 0;
    CHECK_OK(engine.GetMaxBatchSize(&batch));
    CHECK_OK(engine.GetRequestBlockQuotas(&blocks, &slots, &tokens));
    CHECK(batch > 0 && blocks > 0 && slots > 0 && tokens > 0);
    auto request = MakeRequest(RequestId("quota"), std::vector<int64_t>(150, 1));
    CHECK_OK(engine.Forward(request));
    CHECK_OK(engine.GetRequestBlockQuotas(&fewer, &slots, &tokens));
    CHECK_OK(engine.GetProcessingRequest(&running));
    CHECK(fewer < blocks && running == 1);
    CHECK_OK(engine.ControlRequest(RequestId("quota"), Operation::STOP));
    inbox.Wait("quota");
    inbox.Clear();
}

/* A configuration that is wrong, a second Init, an engine without a callback of its own. */
static void CheckInit(const std::string &config)
{
    InferenceEngine engine;
    CHECK_STATUS(engine.Init(nullptr, "/nowhere/config.json"), INVALID_ARG, "/nowhere/config.json");
    CheckUninitialised(engine);
    CHECK_OK(engine.Init(nullptr, config));
    CHECK_STATUS(engine.Init(nullptr, config), ERROR, "the engine is initialised already; finalize it first");
    auto request = MakeRequest(RequestId(1), NEVER_EOS, 1);
    CHECK_STATUS(engine.Forward(request), INVALID_ARG, "callback: give one to Init or to the request");
    Inbox inbox;
    request->SetSendResponseCallback(inbox.Callback());
    CHECK_OK(engine.Forward(request));
    inbox.Wait("1");
}

int main(int, char **argv)
{
    CheckInit(argv[1]);
    Inbox inbox;
    InferenceEngine engine;
    CheckUninitialised(engine);
    CHECK_OK(engine.Init(inbox.Callback(), argv[1]));
    CheckNulls(engine);
    CheckAnswers(engine, inbox);
    CheckTypes(engine, inbox);
    CheckRefusals(engine, inbox);
    CheckStops(engine, inbox);
    CheckQuotas(engine, inbox);
    auto request = MakeRequest(RequestId("running"), NEVER_EOS);
    CHECK_OK(engine.Forward(request));
    CHECK_STATUS(engine.Finalize(), OK, "Success");
    CHECK(inbox.Wait("running").flag == INFER_RESPONSE_EXEC_ERROR);
    CheckUninitialised(engine);
    return 0;
}
