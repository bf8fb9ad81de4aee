"""Input and Output: named, typed, shaped buffers of the Engine API (spec 3.3.1.2.2 and 3.3.1.2.5)."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.contract.errors import BadRequest
from kvloom.engine_api.codes import OK, Code, Status, TensorType

Array = npt.NDArray[Any]

# numpy has no bfloat16: its bits are kept as 16-bit integers; a text is bytes
_NUMPY: dict[TensorType, Any] = {
    TensorType.TYPE_BOOL: np.bool_,
    TensorType.TYPE_UINT8: np.uint8,
    TensorType.TYPE_UINT16: np.uint16,
    TensorType.TYPE_UINT32: np.uint32,
    TensorType.TYPE_UINT64: np.uint64,
    TensorType.TYPE_INT8: np.int8,
    TensorType.TYPE_INT16: np.int16,
    TensorType.TYPE_INT32: np.int32,
    TensorType.TYPE_INT64: np.int64,
    TensorType.TYPE_FP16: np.float16,
    TensorType.TYPE_FP32: np.float32,
    TensorType.TYPE_FP64: np.float64,
    TensorType.TYPE_STRING: np.uint8,
    TensorType.TYPE_BF16: np.uint16,
}


class Tensor:
    """The common base of Input and Output."""

    def __init__(self, name: str, datatype: TensorType, shape: Sequence[int], dim_count: int | None = None) -> None:
        """`dim_count`, if given, must be len(shape). Raises BadRequest that names what is wrong."""
        if not name:
            raise BadRequest("name", "must not be empty")
        if datatype not in _NUMPY:
            raise BadRequest("datatype", f"must be one of TYPE_BOOL to TYPE_BF16, got {datatype!r}")
        if not shape or any(size < 1 for size in shape):
            raise BadRequest("shape", f"must be sizes of at least 1, got {list(shape)}")
        if dim_count is not None and dim_count != len(shape):
            raise BadRequest("dim_count", f"must be {len(shape)}, the number of sizes in shape, got {dim_count}")
        self._name, self._datatype, self._shape = name, TensorType(datatype), list(shape)
        self._buffer: Array = np.empty(0, _NUMPY[datatype])

    def name(self) -> str:
        """INPUT_IDS, OUTPUT_IDS or the name that was given."""
        return self._name

    def dtype(self) -> TensorType:
        """Type of the elements."""
        return self._datatype

    def shape(self) -> list[int]:
        """Sizes of all dimensions, each at least 1."""
        return list(self._shape)

    def dim_count(self) -> int:
        """Number of dimensions."""
        return len(self._shape)

    def buffer(self) -> Array:
        """The elements as a writable flat array, empty before `allocate`."""
        return self._buffer

    def byte_size(self) -> int:
        """Bytes of the buffer."""
        return int(self._buffer.nbytes)

    Name, DType, Shape, DimCount, Buffer, ByteSize = name, dtype, shape, dim_count, buffer, byte_size


class Input(Tensor):
    """A tensor of a request: allocate it, then fill `buffer`."""

    def allocate(self, size: int) -> Status:
        """Create a zeroed buffer of `size` bytes: the size of the shape, or for TYPE_STRING any number of bytes."""
        item_bytes = self._buffer.itemsize
        needed = math.prod(self._shape) * item_bytes
        if size < 1 or (size != needed and self._datatype is not TensorType.TYPE_STRING):
            return Status(
                Code.INVALID_ARG, f"size: {self._name} of shape {self._shape} needs {needed} bytes, got {size}"
            )
        self._buffer = np.zeros(size // item_bytes, self._buffer.dtype)
        return OK

    def get_input_inner(self) -> Array:
        """The buffer in the tensor's shape; a text stays flat."""
        is_text = self._datatype is TensorType.TYPE_STRING
        return self._buffer if is_text or not len(self._buffer) else self._buffer.reshape(self._shape)

    Allocate, GetInputInner = allocate, get_input_inner


class Output(Tensor):
    """int64 values of a response; read-only."""

    def __init__(self, name: str, values: Sequence[int]) -> None:
        super().__init__(name, TensorType.TYPE_INT64, [max(1, len(values))])
        self._shape = [len(values)]
        self._buffer = np.array(values, np.int64)
        self._buffer.flags.writeable = False
