"""The Engine API's values: every class, method, enum and code of spec 3.3.1, under both its names."""

import numpy as np
import pytest

from kvloom import engine_api as api
from kvloom.contract.errors import BadRequest
from kvloom.engine_api import (
    Code,
    Compare,
    DataType,
    Error,
    InferenceEngine,
    InferenceRequest,
    InferenceResponse,
    InferResponseEndFlag,
    Input,
    LLM_ENGINE_DataType,
    LLM_ENGINE_MemoryType,
    LLM_ENGINE_ParameterType,
    Operation,
    Output,
    RequestId,
    SamplingParams,
    Status,
    TensorType,
)
from kvloom.rank.byte_tokenizer import ByteTokenizer

METHODS = {
    InferenceEngine: "Init GetRequestBlockQuotas Forward GetProcessingRequest ControlRequest Finalize GetMaxBatchSize",
    Input: "Allocate Name DType Shape DimCount Buffer ByteSize GetInputInner",
    Output: "Name DType Shape DimCount Buffer ByteSize",
    InferenceRequest: "AddOriginalInput RemoveOriginalInput MaxOutputLen SetMaxOutputLen GetRequestId "
    "GetSamplingParams SetSamplingParams SetSendResponseCallback HasSampling "
    "SetInputText GetInputText IsInputText GetRequestInner",
    RequestId: "Type StringValue UnsignedIntValue",
    InferenceResponse: "IsEOS GetFlags ImmutableOutput GetRequestId",
    Error: "ErrorCode Message IsOk ToString CodeToString",
    Status: "IsOk StatusCode StatusMsg",
}
FLAGS = "CONTINUE EOS CANCEL EXEC_ERROR ILLEGAL_INPUT REACH_MAX_SEQ_LEN REACH_MAX_OUTPUT_LEN"
TYPES = "INVALID BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 STRING BF16 BUTT"


@pytest.mark.parametrize(("cls", "names"), METHODS.items())
def test_every_method_has_its_name_of_c_plus_plus(cls, names):
    assert [name for name in names.split() if not callable(getattr(cls, name, None))] == []


def test_every_enum_has_the_numbers_of_the_header():
    assert [flag.name for flag in InferResponseEndFlag] == [f"INFER_RESPONSE_{name}" for name in FLAGS.split()]
    assert [flag.value for flag in InferResponseEndFlag] == list(range(7))
    assert [(t.name, t.value) for t in LLM_ENGINE_DataType] == [(f"TYPE_{n}", i) for i, n in enumerate(TYPES.split())]
    assert [t.value for t in LLM_ENGINE_MemoryType] == [0, 1, 2]
    assert [t.value for t in LLM_ENGINE_ParameterType] == [0, 1, 2, 3]
    assert (Operation.STOP.value, DataType.UINT64.value, DataType.STRING.value) == (1, 0, 1)
    assert [code.name for code in Code] == ["OK", "ERROR", "INVALID_ARG", "NOT_FOUND"]
    assert Error.Code.INVALID is Code.INVALID_ARG
    assert set(api.__all__) <= set(dir(api))


@pytest.mark.parametrize(
    ("code", "text"),
    [(Code.OK, "OK:"), (Code.ERROR, "Error:"), (Code.INVALID_ARG, "Invalid argument:"), (Code.NOT_FOUND, "Not found:")],
)
def test_an_error_says_its_code_and_its_message(code, text):
    error = Error(code, "no home")
    assert (error.ErrorCode(), error.Message(), error.IsOk()) == (code, "no home", code is Code.OK)
    assert (error.ToString(), Error.CodeToString(code), Error(code).to_string()) == (f"{text} no home", text, text)
    assert (Status(error).status_code(), Status(error).StatusMsg()) == (code, "no home")


def test_statuses_are_equal_when_their_codes_are():
    assert Status(Code.ERROR, "a") == Status(Error(Code.ERROR, "b"))
    assert len({Status(Code.ERROR, "a"), Status(Code.ERROR, "b"), Status()}) == 2
    assert Status() != Status(Code.NOT_FOUND)
    assert Status() != "OK"
    assert "Not found: x" in repr(Status(Code.NOT_FOUND, "x"))


def test_a_request_id_is_a_text_or_a_number():
    text, number = RequestId("7"), RequestId(7)
    assert (text.Type(), text.StringValue(), text.UnsignedIntValue()) == (DataType.STRING, "7", 0)
    assert (number.Type(), number.StringValue(), number.UnsignedIntValue()) == (DataType.UINT64, "", 7)
    assert text != number
    assert {RequestId(number), number} == {number}
    assert RequestId("x").assign(8) == RequestId(8)


@pytest.mark.parametrize("value", [-1, 2**64, 1.5, None, True])
def test_other_request_ids_are_refused(value):
    with pytest.raises(BadRequest, match="request_id"):
        RequestId(value)


def test_compare_is_a_strict_order_of_all_ids():
    ids = [RequestId(v) for v in (5, 3, "b", "a", "3", 3)]
    less = Compare()
    assert less(RequestId(3), RequestId(5))
    assert not less(RequestId(5), RequestId(3))
    for a in ids:
        assert not less(a, a)
        for b in ids:
            assert (less(a, b) or less(b, a)) == (a != b)


def test_an_input_holds_what_its_shape_needs():
    tensor = Input("INPUT_IDS", TensorType.TYPE_INT32, [1, 3], 2)
    assert (tensor.Name(), tensor.DType(), tensor.Shape(), tensor.DimCount()) == ("INPUT_IDS", 8, [1, 3], 2)
    assert tensor.byte_size() == 0
    assert tensor.Allocate(13) == Status(Code.INVALID_ARG)
    assert tensor.Allocate(0) == Status(Code.INVALID_ARG)
    assert tensor.Allocate(12).is_ok()
    tensor.Buffer()[:] = [4, 5, 6]
    assert tensor.ByteSize() == 12
    assert tensor.GetInputInner().tolist() == [[4, 5, 6]]
    text = Input("t", TensorType.TYPE_STRING, [1])
    assert text.allocate(5).is_ok()
    assert bytes(text.get_input_inner()) == b"\0" * 5


@pytest.mark.parametrize(
    ("name", "type_", "shape", "dim_count", "field"),
    [
        ("", TensorType.TYPE_INT64, [1], 1, "name"),
        ("x", TensorType.TYPE_INVALID, [1], 1, "datatype"),
        ("x", TensorType.TYPE_BUTT, [1], 1, "datatype"),
        ("x", TensorType.TYPE_INT64, [], 0, "shape"),
        ("x", TensorType.TYPE_INT64, [0], 1, "shape"),
        ("x", TensorType.TYPE_INT64, [1, 2], 1, "dim_count"),
    ],
)
def test_an_input_that_cannot_be_is_refused_by_name(name, type_, shape, dim_count, field):
    with pytest.raises(BadRequest, match=f"^{field}: "):
        Input(name, type_, shape, dim_count)
    request = InferenceRequest("r")
    status, tensor = request.AddOriginalInput(name, type_, shape, dim_count)
    assert (status.StatusCode(), tensor) == (Code.INVALID_ARG, None)


def test_a_request_holds_inputs_limits_and_sampling():
    request = InferenceRequest(RequestId(9))
    status, tensor = request.AddOriginalInput(TensorType.TYPE_INT64, [1, 2], 2)
    assert status.IsOk()
    assert tensor is not None
    tensor.allocate(16)
    tensor.buffer()[:] = [3, 4]
    assert request.add_original_input(TensorType.TYPE_INT64, [1])[0] == Status(Code.INVALID_ARG)
    assert request.GetRequestInner().prompt_ids == (3, 4)
    assert request.RemoveOriginalInput("INPUT_IDS").IsOk()
    assert request.RemoveOriginalInput("INPUT_IDS") == Status(Code.NOT_FOUND)
    assert [request.SetMaxOutputLen(n) for n in (0, 2**32, 5)] == [False, False, True]
    assert request.MaxOutputLen() == 5
    assert request.GetRequestId() == RequestId(9)
    assert (request.IsInputText(), request.GetInputText(), request.HasSampling()) == (False, "", False)
    request.SetInputText("hi")
    assert (request.IsInputText(), request.GetInputText()) == (True, "hi")


def test_sampling_is_greedy_unless_asked_for_and_each_field_arrives():
    request = InferenceRequest("r")
    request.set_input_ids([1])
    assert request.get_request_inner().params.is_greedy
    params = SamplingParams(0.5, 3, 0.9, 0.8, True, 7, 1.2, True, 0.1, -0.1)
    request.SetSamplingParams(params)
    params.topK = 99  # the request has its own copy
    assert request.HasSampling()
    assert request.GetSamplingParams().topK == 3
    inner = request.get_request_inner().params
    assert (inner.temperature, inner.top_k, inner.top_p, inner.typical_p, inner.seed) == (0.5, 3, 0.9, 0.8, 7)
    assert (inner.repetition_penalty, inner.watermark) == (1.2, True)
    assert (inner.frequency_penalty, inner.presence_penalty) == (0.1, -0.1)
    assert SamplingParams(seed=0, do_sample=True).to_engine().seed is None
    assert SamplingParams(temperature=0.7).to_engine().is_greedy


def test_camel_case_fields_are_the_same_fields():
    params = SamplingParams()
    params.topP, params.typicalP, params.doSample = 0.5, 0.6, True
    params.repetitionPenalty, params.frequencyPenalty, params.presencePenalty = 1.1, 0.2, 0.3
    assert (params.top_p, params.typical_p, params.do_sample) == (0.5, 0.6, True)
    assert (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) == (1.1, 0.2, 0.3)


@pytest.mark.parametrize(("field", "value"), [("top_p", 2.0), ("seed", 2**32), ("seed", -1), ("temperature", -1.0)])
def test_sampling_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(BadRequest, match=f"^{field}: "):
        SamplingParams(do_sample=True, **{field: value}).to_engine()


def _with(**inputs):
    request = InferenceRequest("r")
    for name, type_ in inputs.items():
        _, tensor = request.add_original_input(type_, [1, 2], name=name)
        tensor.allocate(tensor.buffer().itemsize * 2)
    return request


def test_inputs_that_the_engine_does_not_take_are_refused_by_name():
    with pytest.raises(BadRequest, match="INPUT_IDS: is missing"):
        _with().get_request_inner()
    with pytest.raises(BadRequest, match="SAMPLING: is not an input"):
        _with(SAMPLING=TensorType.TYPE_FP32).get_request_inner()
    for type_ in (TensorType.TYPE_FP32, TensorType.TYPE_BF16, TensorType.TYPE_BOOL):
        with pytest.raises(BadRequest, match="INPUT_IDS: must hold integers"):
            _with(INPUT_IDS=type_).get_request_inner()
    both = _with(INPUT_IDS=TensorType.TYPE_INT64)
    both.set_input_text("x")
    with pytest.raises(BadRequest, match="both given"):
        both.get_request_inner()
    both.remove_original_input("INPUT_IDS")
    with pytest.raises(BadRequest, match="needs a tokenizer"):
        both.get_request_inner()


def test_a_response_has_its_tokens_and_how_it_goes_on():
    response = InferenceResponse(RequestId("a"), [5, 6], InferResponseEndFlag.INFER_RESPONSE_CONTINUE)
    status, output = response.ImmutableOutput("OUTPUT_IDS")
    assert status.IsOk()
    assert output is not None
    assert (output.Shape(), output.Buffer().tolist(), output.DType()) == ([2], [5, 6], TensorType.TYPE_INT64)
    assert output.byte_size() == 16
    with pytest.raises(ValueError, match="read-only"):
        output.buffer()[0] = np.int64(1)
    assert response.immutable_output("IBIS_EOS_ATTR")[1].buffer().tolist() == [0, 2]
    assert response.immutable_output("LOGITS") == (Status(Code.NOT_FOUND), None)
    assert (response.IsEOS(), response.GetFlags(), response.GetRequestId()) == (False, 0, RequestId("a"))
    last = InferenceResponse(RequestId("a"), [], InferResponseEndFlag.INFER_RESPONSE_CANCEL)
    assert last.is_eos()
    assert last.immutable_output("OUTPUT_IDS")[1].shape() == [0]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("top_k", 1.5, "must be a whole number, got 1.5"),
        ("seed", 1.5, "must be a whole number, got 1.5"),
        ("seed", None, "must be a whole number, got None"),
        ("temperature", "0.5", "must be a number, got '0.5'"),
        ("presence_penalty", None, "must be a number, got None"),
    ],
)
def test_what_is_no_number_is_refused_by_its_name(name, value, words):
    with pytest.raises(BadRequest, match=words) as caught:
        SamplingParams(do_sample=True, **{name: value}).to_engine()
    assert caught.value.field == name


@pytest.mark.parametrize("length", [0, 2**32, 1.5, np.float32(2), None, "2"])
def test_a_length_that_is_none_changes_nothing(length):
    request = InferenceRequest("a")
    assert request.set_max_output_len(np.uint8(3))
    assert not request.set_max_output_len(length)
    assert request.max_output_len() == 3


@pytest.mark.parametrize("ids", [[1.5], ["1"], [[1, 2]], np.zeros((1, 2), int), None, 5, [2**70]])
def test_ids_that_are_no_list_of_whole_numbers_are_refused(ids):
    with pytest.raises(BadRequest, match="INPUT_IDS: must be a list of whole numbers"):
        InferenceRequest("a").set_input_ids(ids)


def test_a_text_that_is_none_is_refused():
    with pytest.raises(BadRequest, match="input_text: must be a text, got int"):
        InferenceRequest("a").set_input_text(5)


@pytest.mark.parametrize("name", ["seed", "top_k", "temperature", "top_p", "repetition_penalty", "presence_penalty"])
@pytest.mark.parametrize("digits", [400, 5000])
def test_a_number_of_any_size_is_refused_by_its_name(name: str, digits: int):
    for value in (10**digits, -(10**digits)):
        with pytest.raises(BadRequest, match=f"{name}: must be a number of at most 512 bits"):
            SamplingParams(**{name: value}).to_engine()
        with pytest.raises(BadRequest, match="request_id: must be a number of at most 512 bits"):
            RequestId(value)
        assert not InferenceRequest(1).set_max_output_len(value)


def test_a_text_is_read_as_far_as_it_takes_to_see_that_it_is_too_long():
    read = []

    class Counting(ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
            read.append(max_tokens)
            return super().encode(text, add_special_tokens, max_tokens)

    request = InferenceRequest(1)
    request.set_input_text("x" * 300)
    assert len(request.get_request_inner(Counting(), 200).prompt_ids) == 300, "the engine says by how much"
    request.set_input_text("x" * 401)
    with pytest.raises(BadRequest, match="input_text: has more than 400 tokens"):
        request.get_request_inner(Counting(), 200)
    assert read == [400], "what its length says is not read at all"
