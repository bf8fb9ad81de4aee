"""Bodies of the Open Inference Protocol (KServe v2) and of Triton's generate extension.

An infer body comes as JSON, or as JSON followed by raw tensors (Triton's binary tensor extension).
"""

import re
import struct
from typing import Any

import msgspec

from kvloom.contract.errors import BadRequest
from kvloom.contract.json_numbers import as_whole, converted
from kvloom.server.dialects.constraints import Constraints
from kvloom.server.dialects.parameters import Parameters
from kvloom.server.http.body import decode_body

JSON_LENGTH_HEADER = "inference-header-content-length"
MAX_NAME_CHARS = 256
_LENGTH = re.compile(r"[0-9]{1,12}\Z")
# struct format of one element; ids are announced as UINT32, but clients send these too
FORMATS = {"UINT32": "I", "INT32": "i", "UINT64": "Q", "INT64": "q"}


class InferInput(msgspec.Struct, kw_only=True):
    """`data` may be flat or nested as `shape` says; absent when the tensor is binary."""

    name: str
    shape: list[int]
    datatype: str | None = None
    dataType: str | None = None
    parameters: dict[str, Any] | None = None
    data: list[Any] | None = None


class InferOutput(msgspec.Struct, kw_only=True):
    name: str
    parameters: dict[str, Any] | None = None


class InferBody(Constraints, kw_only=True):
    id: str | None = None
    inputs: list[InferInput]
    outputs: list[InferOutput] | None = None
    parameters: dict[str, Any] | None = None


class TextInputBody(Constraints, kw_only=True):
    id: str | None = None
    text_input: str
    parameters: Parameters | None = None


class StopBody(msgspec.Struct):
    id: str


infer_decoder = msgspec.json.Decoder(InferBody)
generate_decoder = msgspec.json.Decoder(TextInputBody)
stop_decoder = msgspec.json.Decoder(StopBody)


class Infer:
    """An infer request: the prompt's token ids, its parameters, and how the answer is wanted."""

    def __init__(self, body: bytes | bytearray, json_length: str | None) -> None:
        """`json_length`: the value of Inference-Header-Content-Length. Raises BadRequest naming the field."""
        num_json = _json_length(json_length, len(body))
        request = decode_body(infer_decoder, body[:num_json])
        request.refuse_outside()
        self.id = request.id or ""
        tensor = _only_input(request.inputs)
        outer, inner = dict(request.parameters or {}), dict(tensor.parameters or {})
        _refuse("inputs[0]", inner)
        size = inner.pop("binary_data_size", None)
        is_binary = outer.pop("binary_data_output", False)
        self.ids = _binary_ids(tensor, body[num_json:], size) if size is not None else _json_ids(tensor)
        self.parameters = _parameters(outer | inner)
        outputs = request.outputs or []
        if len(outputs) > 1:
            raise BadRequest("outputs", f"must have one entry, got {len(outputs)}")
        self.output_name = outputs[0].name if outputs else "output0"
        wanted = (outputs[0].parameters or {}) if outputs else {}
        _refuse("outputs[0]", wanted)
        self.is_binary_wanted = bool(wanted.get("binary_data", is_binary))


def _refuse(field: str, parameters: dict[str, Any]) -> None:
    """Parameters of a tensor that say where else it lies, or that ask for another one. Raises BadRequest."""
    for name in ("shared_memory_region", "classification"):
        if parameters.get(name):
            raise BadRequest(f"{field}.parameters.{name}", "is not supported; tensors are parts of the bodies")


def infer_answer(head: dict[str, Any], name: str, ids: list[int], is_binary: bool) -> tuple[bytes, dict[str, str]]:
    """The body and its headers. `ids` become one UINT32 tensor of shape [1, n]."""
    output: dict[str, Any] = {"name": name, "shape": [1, len(ids)], "datatype": "UINT32"}
    if not is_binary:
        return msgspec.json.encode({**head, "outputs": [{**output, "data": ids}]}), {}
    raw = struct.pack(f"<{len(ids)}I", *ids)
    output["parameters"] = {"binary_data_size": len(raw)}
    text = msgspec.json.encode({**head, "outputs": [output]})
    return text + raw, {"Inference-Header-Content-Length": str(len(text))}


def _json_length(value: str | None, num_bytes: int) -> int:
    if value is None:
        return num_bytes
    if not _LENGTH.match(value) or int(value) > num_bytes:
        raise BadRequest("Inference-Header-Content-Length", f"must be at most {num_bytes}, the body's length")
    return int(value)


def _only_input(inputs: list[InferInput]) -> InferInput:
    if len(inputs) != 1:
        raise BadRequest("inputs", f"must have one entry, got {len(inputs)}")
    tensor = inputs[0]
    if not 0 < len(tensor.name) <= MAX_NAME_CHARS:
        raise BadRequest("inputs[0].name", f"must have 1 to {MAX_NAME_CHARS} characters")
    if _datatype(tensor) not in FORMATS:
        raise BadRequest("inputs[0].datatype", f"must be one of {', '.join(FORMATS)}, got {_datatype(tensor)!r}")
    return tensor


def _datatype(tensor: InferInput) -> str:
    return tensor.datatype or tensor.dataType or ""


def _json_ids(tensor: InferInput) -> tuple[int, ...]:
    data = tensor.data
    if data is None:
        raise BadRequest("inputs[0].data", "is required")
    if len(data) == 1 and isinstance(data[0], list):
        data = data[0]
    data = [as_whole(each) for each in data]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in data):
        raise BadRequest("inputs[0].data", "must hold whole numbers: token ids")
    _check_shape(tensor, len(data))
    return tuple(data)


def _binary_ids(tensor: InferInput, raw: bytes | bytearray, size: Any) -> tuple[int, ...]:
    letter = FORMATS[_datatype(tensor)]
    width = struct.calcsize(f"<{letter}")
    size = as_whole(size)
    if not isinstance(size, int) or size != len(raw) or size % width:
        raise BadRequest(
            "inputs[0].parameters.binary_data_size",
            f"must be the {len(raw)} bytes after the JSON part, a multiple of {width}, got {size}",
        )
    _check_shape(tensor, size // width)
    return struct.unpack(f"<{size // width}{letter}", raw)


def _check_shape(tensor: InferInput, count: int) -> None:
    if tensor.shape not in ([count], [1, count]):
        raise BadRequest("inputs[0].shape", f"must be [1, {count}], as the data, got {tensor.shape}")


def _parameters(values: dict[str, Any]) -> Parameters:
    try:
        return converted(values, Parameters)
    except msgspec.ValidationError as error:
        raise BadRequest("parameters", str(error).replace(" - at `$.", " at `")) from None
