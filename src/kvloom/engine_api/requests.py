"""RequestId, SamplingParams, InferenceRequest and InferenceResponse (spec 3.3.1.1 and 3.3.1.2)."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from kvloom.contract import request as engine_request
from kvloom.contract import sampling as engine_sampling
from kvloom.contract.errors import BadRequest
from kvloom.contract.tokenizer import Tokenizer
from kvloom.engine_api.codes import OK, Code, DataType, InferResponseEndFlag, Status, TensorType
from kvloom.engine_api.tensors import Input, Output

INPUT_IDS, OUTPUT_IDS, EOS_ATTR = "INPUT_IDS", "OUTPUT_IDS", "IBIS_EOS_ATTR"
_DataType = DataType  # names used inside classes with attributes of the same name
_Output = Output
_MAX_UINT64, _MAX_UINT32 = 2**64 - 1, 2**32 - 1
_MAX_BITS = 512
_COUNTED = 2  # contexts up to which a text's tokens are counted, so that callers learn by how much it is too long


class RequestId:
    """The name of a request: a text or a number; the number 1 and the text "1" are different names."""

    DataType = DataType

    def __init__(self, value: "RequestId | str | int") -> None:
        """Raises BadRequest for a number that does not fit into 64 unsigned bits."""
        self._value: str | int = ""
        self.assign(value)

    def assign(self, value: "RequestId | str | int") -> "RequestId":
        """Change to this name (the C++ `=`). Returns itself."""
        if isinstance(value, RequestId):
            value = value._value
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise BadRequest("request_id", f"must be a text or a whole number, got {value!r}")
        if isinstance(value, int) and not 0 <= _printable("request_id", value) <= _MAX_UINT64:
            raise BadRequest("request_id", f"must be between 0 and {_MAX_UINT64}, got {value}")
        self._value = value
        return self

    def type(self) -> _DataType:
        """Whether the id is a text or a number."""
        return DataType.STRING if isinstance(self._value, str) else DataType.UINT64

    def string_value(self) -> str:
        """The text; "" when the name is a number."""
        return self._value if isinstance(self._value, str) else ""

    def unsigned_int_value(self) -> int:
        """The number; 0 when the name is a text."""
        return 0 if isinstance(self._value, str) else self._value

    def key(self) -> str:
        """A text that is unique to this name."""
        return f"{self.type().name}:{self._value}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RequestId) and self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.key())

    def __repr__(self) -> str:
        return f"RequestId({self._value!r})"

    Type, StringValue, UnsignedIntValue = type, string_value, unsigned_int_value


class Compare:
    """Strict order of names: numbers by value, then texts by hash, equal hashes by the text."""

    def __call__(self, lhs: RequestId, rhs: RequestId) -> bool:
        return self._key(lhs) < self._key(rhs)

    @staticmethod
    def _key(id: RequestId) -> tuple[int, int, int, str]:
        text = id.string_value()
        return (id.type().value, id.unsigned_int_value(), hash(text), text)


def _alias(name: str) -> property:
    def set_field(self: Any, value: Any) -> None:
        setattr(self, name, value)

    return property(lambda self: getattr(self, name), set_field)


def _whole(name: str, value: Any) -> int:
    """The value as a plain int, which messages to a rank can hold (numpy's are not). Raises BadRequest."""
    try:
        return _printable(name, int(operator.index(value)))
    except TypeError:
        raise BadRequest(name, f"must be a whole number, got {value!r}") from None


def _printable(name: str, value: int) -> int:
    """The value. Raises BadRequest for one of hundreds of digits, which no field takes and Python may not print."""
    if value.bit_length() > _MAX_BITS:
        raise BadRequest(name, f"must be a number of at most {_MAX_BITS} bits")
    return value


def _real(name: str, value: Any) -> float:
    """The value as a plain float. Raises BadRequest."""
    if not isinstance(value, int | float | np.number):
        raise BadRequest(name, f"must be a number, got {value!r}")
    return float(_printable(name, value) if isinstance(value, int) else value)


@dataclass
class SamplingParams:
    """How tokens are sampled. do_sample False is greedy, whatever other fields say; seed 0 = the engine draws one."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    do_sample: bool = False
    seed: int = 0
    repetition_penalty: float = 1.0
    watermark: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    def to_engine(self) -> engine_sampling.SamplingParams:
        """Raises BadRequest naming the field that is out of range or not a number. numpy's numbers are accepted."""
        seed = _whole("seed", self.seed)
        if not 0 <= seed <= _MAX_UINT32:
            raise BadRequest("seed", f"must be between 0 and {_MAX_UINT32}, got {seed}")
        given = {name: read(name, getattr(self, name)) for name, read in _READERS.items()}
        params = engine_sampling.SamplingParams(**{**given, "seed": seed or None})
        return params if self.do_sample else replace(params, temperature=0.0)


_READ: Mapping[Any, Callable[[str, Any], Any]] = {int: _whole, float: _real, bool: lambda _, value: bool(value)}
_READERS = {each.name: _READ[each.type] for each in fields(SamplingParams) if each.name in engine_sampling.ROWS}
for _name in (each.name for each in fields(SamplingParams) if "_" in each.name):  # C++'s topK for top_k
    setattr(SamplingParams, _name[0] + _name.title().replace("_", "")[1:], _alias(_name))
GREEDY = SamplingParams()


class InferenceResponse:
    """The result of one step for one request."""

    Output = Output

    def __init__(
        self, request_id: RequestId, output_ids: Sequence[int], flag: InferResponseEndFlag, error: str = ""
    ) -> None:
        self._request_id, self._flag = request_id, flag
        self.error = error  # only with EXEC_ERROR and ILLEGAL_INPUT
        self._outputs = {
            OUTPUT_IDS: Output(OUTPUT_IDS, output_ids),
            EOS_ATTR: Output(EOS_ATTR, [int(flag), len(output_ids)]),
        }

    def is_eos(self) -> bool:
        """Whether this is the request's last response, however it ended."""
        return self._flag is not InferResponseEndFlag.INFER_RESPONSE_CONTINUE

    def get_flags(self) -> InferResponseEndFlag:
        """Whether the request continues, or how it ended."""
        return self._flag

    def immutable_output(self, name: str) -> tuple[Status, _Output | None]:
        """OUTPUT_IDS: the tokens of this step; IBIS_EOS_ATTR: the flag and the number of tokens."""
        if name not in self._outputs:
            return Status(Code.NOT_FOUND, f"no output {name!r}; there are {', '.join(self._outputs)}"), None
        return OK, self._outputs[name]

    def get_request_id(self) -> RequestId:
        """The id of the request that this answers."""
        return self._request_id

    IsEOS, GetFlags, ImmutableOutput, GetRequestId = is_eos, get_flags, immutable_output, get_request_id


SendResponseCallback = Callable[[InferenceResponse], object]


def _tokens(text: str, encoder: Tokenizer, most: int | None) -> tuple[int, ...]:
    """The text's tokens. Raises BadRequest for more than `most`, if possible before all of it was read."""
    is_endless = most is not None and encoder.least_tokens(text) > most
    ids = [] if is_endless else encoder.encode(text, max_tokens=most)
    if most is not None and (is_endless or len(ids) > most):
        raise BadRequest("input_text", f"has more than {most} tokens, {_COUNTED} times what prompt and answer may have")
    return tuple(ids)


class InferenceRequest:
    """A prompt, as token ids or as text, and how to answer it."""

    def __init__(self, request_id: RequestId | str | int) -> None:
        self._id = RequestId(request_id)
        self._inputs: dict[str, Input] = {}
        self._text: str | None = None
        self._sampling: SamplingParams | None = None
        self._max_output_len: int | None = None
        self.callback: SendResponseCallback | None = None  # None = the engine's

    def add_original_input(
        self, datatype: TensorType, shape: Sequence[int], dim_count: int | None = None, name: str = INPUT_IDS
    ) -> tuple[Status, Input | None]:
        """A new input tensor, to be allocated and filled."""
        if name in self._inputs:
            return Status(Code.INVALID_ARG, f"input {name!r} is there already"), None
        try:
            self._inputs[name] = Input(name, datatype, shape, dim_count)
        except BadRequest as error:
            return Status(Code.INVALID_ARG, str(error)), None
        return OK, self._inputs[name]

    def AddOriginalInput(self, *args: Any) -> tuple[Status, Input | None]:
        """Both overloads of C++: with and without a name as the first argument."""
        if args and isinstance(args[0], str):
            name, datatype, shape, dim_count = args
            return self.add_original_input(datatype, shape, dim_count, name)
        return self.add_original_input(*args)

    def remove_original_input(self, name: str) -> Status:
        """Drop the input tensor of that name. NOT_FOUND when there is none."""
        if self._inputs.pop(name, None) is None:
            return Status(Code.NOT_FOUND, f"no input {name!r}")
        return OK

    def set_input_ids(self, ids: Sequence[int]) -> None:
        """Shorthand for a filled INPUT_IDS tensor of [1, n] int64.

        Raises BadRequest when `ids` is empty or holds anything but whole numbers.
        """
        given = np.asarray(ids)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise BadRequest(INPUT_IDS, "must be a list of whole numbers")
        tensor = Input(INPUT_IDS, TensorType.TYPE_INT64, [1, len(given)])
        tensor.allocate(8 * len(given))
        tensor.buffer()[:] = given
        self._inputs[INPUT_IDS] = tensor

    def max_output_len(self) -> int:
        """Most tokens of the answer; 0 = only the engine's limits apply."""
        return self._max_output_len or 0

    def set_max_output_len(self, max_output_len: int) -> bool:
        """Set it. False, and nothing changes, unless it is an integer between 1 and 2^32 - 1."""
        try:
            value = _whole("max_output_len", max_output_len)
        except BadRequest:
            return False
        if not 1 <= value <= _MAX_UINT32:
            return False
        self._max_output_len = value
        return True

    def get_request_id(self) -> RequestId:
        """The id that the request was made with."""
        return self._id

    def get_sampling_params(self) -> SamplingParams:
        """The parameters that were set, else greedy."""
        return replace(self._sampling or GREEDY)

    def set_sampling_params(self, params: SamplingParams) -> None:
        """Set the sampling parameters, by copying; they are checked when the request is handed over."""
        self._sampling = replace(params)

    def has_sampling(self) -> bool:
        """Whether sampling parameters were set."""
        return self._sampling is not None

    def set_send_response_callback(self, callback: SendResponseCallback) -> None:
        """Set a callback for this request instead of the engine's."""
        self.callback = callback

    def set_input_text(self, text: str) -> None:
        """A prompt as text, instead of token ids. Raises BadRequest when it is not a str."""
        if not isinstance(text, str):
            raise BadRequest("input_text", f"must be a text, got {type(text).__name__}")
        self._text = text

    def get_input_text(self) -> str:
        """The prompt that was set as text; "" when there is none."""
        return self._text or ""

    def is_input_text(self) -> bool:
        """Whether the prompt was set as text."""
        return self._text is not None

    def get_request_inner(self, encoder: Tokenizer | None = None, context: int | None = None) -> engine_request.Request:
        """The request in the engine's form; a text needs `encoder`, and is only read as far as `context` tokens need.

        Raises BadRequest that names what is wrong.
        """
        params = self.get_sampling_params().to_engine()
        if self._max_output_len is not None:
            params = replace(params, max_tokens=min(self._max_output_len, 2**31 - 1))
        return engine_request.Request(self._id.key(), self._prompt(encoder, context), params)

    def _prompt(self, encoder: Tokenizer | None, context: int | None) -> tuple[int, ...]:
        others = sorted(self._inputs.keys() - {INPUT_IDS})
        if others:
            raise BadRequest(others[0], f"is not an input of the engine; it takes {INPUT_IDS}")
        tensor = self._inputs.get(INPUT_IDS)
        if self._text is not None:
            if tensor is not None:
                raise BadRequest(INPUT_IDS, "and an input text are both given; give one")
            if encoder is None:
                raise BadRequest("input_text", "needs a tokenizer")
            return _tokens(self._text, encoder, None if context is None else _COUNTED * context)
        if tensor is None or not tensor.byte_size():
            raise BadRequest(INPUT_IDS, "is missing: add and fill it, or set a text")
        if not np.issubdtype(tensor.buffer().dtype, np.integer) or tensor.dtype() is TensorType.TYPE_BF16:
            raise BadRequest(INPUT_IDS, f"must hold integers, got {tensor.dtype().name}")
        return tuple(tensor.buffer().tolist())

    RemoveOriginalInput, MaxOutputLen, SetMaxOutputLen = remove_original_input, max_output_len, set_max_output_len
    GetRequestId, GetSamplingParams, SetSamplingParams = get_request_id, get_sampling_params, set_sampling_params
    HasSampling, SetSendResponseCallback = has_sampling, set_send_response_callback
    SetInputText, GetInputText, IsInputText = set_input_text, get_input_text, is_input_text
    GetRequestInner = get_request_inner
