"""Messages between libkvloom_engine.so and its host, in the format of cpp/wire.hpp. No I/O.

A message is its length, one letter, and its fields. Who sends what (a text is its length and its bytes):

  library  H protocol                        hello, before anything else
           I call, text                      load the model of a config.json
           R call, request, is_checked, ...  Forward: the fields of `unpack_request`
           S call, request                   ControlRequest STOP; call 0 gets no answer
           Q call                            GetRequestBlockQuotas
           F call                            Finalize
  host     H protocol, text                  the answer to a hello, with the release of kvloom
           a call, code, text, numbers       the answer to a call: of I the batch size, of Q the three quotas
           e request, flag, text, numbers    a response: the error, and the tokens of the step
           l                                 a sign of life, while a model is loaded

A side that receives another protocol number stops. Requests are identified by numbers of the library, which keeps their
names.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from kvloom.contract.errors import BadRequest
from kvloom.engine_api.codes import Code, TensorType
from kvloom.engine_api.requests import OUTPUT_IDS, InferenceRequest, InferenceResponse, SamplingParams
from kvloom.engine_api.tensors import Input

PROTOCOL = 1  # the same as in cpp/wire.hpp
MAX_MESSAGE_BYTES = 64 << 20
LENGTH = struct.Struct("=I")
_LETTERS: Mapping[Any, str] = {float: "f", int: "I", bool: "?"}
_SAMPLING = "".join(_LETTERS[each.type] for each in fields(SamplingParams))  # in the order of C++'s


class WireError(Exception):
    """The peer does not speak this protocol; its stream cannot be read any further."""


@dataclass(slots=True)
class Fields:
    """Reads the fields of a message in order; raises WireError when there are too few."""

    message: bytes
    at: int = 0

    def take(self, format: str) -> tuple[Any, ...]:
        """Numbers in `format`, in the letters of `struct`, without padding."""
        try:
            found = struct.unpack_from(f"={format}", self.message, self.at)
        except struct.error as error:
            raise WireError(str(error)) from None
        self.at += struct.calcsize(f"={format}")
        return found

    def number(self, format: str) -> int:
        return int(self.take(format)[0])

    def bytes(self) -> bytes:
        """The bytes of a text."""
        length = self.number("I")
        if length > len(self.message) - self.at:
            raise WireError("a text is longer than its message")
        self.at += length
        return self.message[self.at - length : self.at]


def _pack(letter: bytes, fields: bytes) -> bytes:
    return LENGTH.pack(1 + len(fields)) + letter + fields


def _text(text: str) -> bytes:
    encoded = text.encode("utf-8", "backslashreplace")
    return LENGTH.pack(len(encoded)) + encoded


def pack_hello(release: str, protocol: int = PROTOCOL) -> bytes:
    return _pack(b"H", struct.pack("=I", protocol) + _text(release))


def pack_answer(call: int, code: Code, message: str, values: Sequence[int] = ()) -> bytes:
    fields = struct.pack("=IB", call, code.value) + _text(message)
    return _pack(b"a", fields + struct.pack(f"=I{len(values)}Q", len(values), *values))


def pack_response(request: int, response: InferenceResponse) -> bytes:
    _, output = response.immutable_output(OUTPUT_IDS)
    ids = b"" if output is None else output.buffer().tobytes()
    fields = struct.pack("=QB", request, response.get_flags()) + _text(response.error)
    return _pack(b"e", fields + LENGTH.pack(len(ids) // 8) + ids)


SIGN_OF_LIFE = _pack(b"l", b"")


def unpack_request(number: int, fields: Fields) -> InferenceRequest:
    """The request in the rest of an R message. Raises BadRequest when a text is not valid UTF-8, WireError."""
    request = InferenceRequest(number)
    max_output_len, has_sampling = fields.take("I?")
    sampling = SamplingParams(*fields.take(_SAMPLING))
    if max_output_len:
        request.set_max_output_len(int(max_output_len))
    if has_sampling:
        request.set_sampling_params(sampling)
    is_text, text = fields.number("?"), fields.bytes()
    if is_text:
        request.set_input_text(_decode("input_text", text))
    for _ in range(fields.number("I")):
        name = _decode("name of an input", fields.bytes())
        datatype = TensorType(fields.number("B"))
        shape = np.frombuffer(fields.bytes(), np.int64).tolist()
        status, tensor = request.add_original_input(datatype, shape, None, name)
        content = fields.bytes()
        if tensor is None:
            raise BadRequest(name, status.status_msg())
        if content:
            _fill(tensor, content)
    return request


def _fill(tensor: Input, content: bytes) -> None:
    status = tensor.allocate(len(content))
    if not status.is_ok():
        raise BadRequest(tensor.name(), status.status_msg())
    tensor.buffer()[:] = np.frombuffer(content, tensor.buffer().dtype)


def _decode(field: str, text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(field, f"is not UTF-8 at byte {error.start}") from None
