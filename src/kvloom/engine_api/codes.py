"""Codes, flags and statuses of the Engine API (spec 3.3.1.1, 3.3.1.2.7 and 3.3.1.2.8)."""

from enum import Enum, IntEnum


class Code(Enum):
    """Code of a Status (spec 3.3.1.2.7)."""

    OK = 0
    ERROR = 1
    INVALID_ARG = 2
    INVALID = 2  # noqa: PIE796 - the name that the parameter tables use
    NOT_FOUND = 3


_CODE_TEXT = {Code.OK: "OK:", Code.ERROR: "Error:", Code.INVALID_ARG: "Invalid argument:", Code.NOT_FOUND: "Not found:"}


_Code = Code  # the name used inside Error


class Operation(IntEnum):
    """Operations of `control_request` on a running request."""

    STOP = 1


class InferResponseEndFlag(IntEnum):
    """Whether a request continues, or how it ended; the last response of every request has one other than CONTINUE."""

    INFER_RESPONSE_CONTINUE = 0
    INFER_RESPONSE_EOS = 1
    INFER_RESPONSE_CANCEL = 2  # stopped by control_request
    INFER_RESPONSE_EXEC_ERROR = 3  # the model failed; the response's error says how
    INFER_RESPONSE_ILLEGAL_INPUT = 4  # the request can never run; the response's error says why
    INFER_RESPONSE_REACH_MAX_SEQ_LEN = 5
    INFER_RESPONSE_REACH_MAX_OUTPUT_LEN = 6


class MemoryType(IntEnum):
    """Memory that holds a tensor (LLM_ENGINE_MemoryType)."""

    LLMENGINE_MEMORY_CPU = 0
    LLMENGINE_MEMORY_CPU_PINNED = 1
    LLMENGINE_MEMORY_GPU = 2


class ParameterType(IntEnum):
    """Type of a request parameter (LLM_ENGINE_ParameterType)."""

    LLM_ENGINE_PARAMETER_STRING = 0
    LLM_ENGINE_PARAMETER_INT = 1
    LLM_ENGINE_PARAMETER_BOOL = 2
    LLM_ENGINE_PARAMETER_BYTES = 3


class TensorType(IntEnum):
    """Type of a tensor's elements (LLM_ENGINE_DataType)."""

    TYPE_INVALID = 0
    TYPE_BOOL = 1
    TYPE_UINT8 = 2
    TYPE_UINT16 = 3
    TYPE_UINT32 = 4
    TYPE_UINT64 = 5
    TYPE_INT8 = 6
    TYPE_INT16 = 7
    TYPE_INT32 = 8
    TYPE_INT64 = 9
    TYPE_FP16 = 10
    TYPE_FP32 = 11
    TYPE_FP64 = 12
    TYPE_STRING = 13
    TYPE_BF16 = 14
    TYPE_BUTT = 15


class DataType(Enum):
    """Type of a RequestId."""

    UINT64 = 0
    STRING = 1


class Error:
    """A code and its message."""

    Code = Code

    def __init__(self, code: _Code = Code.OK, msg: str = "") -> None:
        self._code, self._message = code, msg

    def error_code(self) -> _Code:
        """The code; OK when nothing failed."""
        return self._code

    def message(self) -> str:
        """The message without the code; "" when there is none."""
        return self._message

    def is_ok(self) -> bool:
        """Whether the code is OK."""
        return self._code is Code.OK

    def to_string(self) -> str:
        """The code in words, then the message: "Error: no such model"."""
        return f"{self.code_to_string(self._code)} {self._message}".rstrip()

    @staticmethod
    def code_to_string(code: _Code) -> str:
        """The code in words, with a colon: "Not found:"."""
        return _CODE_TEXT[code]

    __str__ = to_string
    ErrorCode, Message, IsOk, ToString, CodeToString = error_code, message, is_ok, to_string, code_to_string


class Status:
    """The result of a call. Two statuses are equal when their codes are."""

    def __init__(self, code: _Code | Error = Code.OK, msg: str = "") -> None:
        """From a code and a message, or from an Error."""
        self._error = code if isinstance(code, Error) else Error(code, msg)

    def is_ok(self) -> bool:
        """Whether the call succeeded."""
        return self._error.is_ok()

    def status_code(self) -> _Code:
        """The code of the result."""
        return self._error.error_code()

    def status_msg(self) -> str:
        """What failed, and why; "" for a call that succeeded."""
        return self._error.message()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Status) and self.status_code() is other.status_code()

    def __hash__(self) -> int:
        return hash(self.status_code())

    def __repr__(self) -> str:
        return f"Status({self._error})"

    IsOk, StatusCode, StatusMsg = is_ok, status_code, status_msg


OK = Status()
