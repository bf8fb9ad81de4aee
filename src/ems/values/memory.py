"""Memory of a value: buffers, arrays, tensors and addresses on the host. Nothing is copied."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ems.buffer import KvBufferWrapper
from ems.common.exception import invalid_argument
from ems.runs import addresses_of
from ems.tensors import NOT_IN_MEMORY, imported_torch, is_in_memory

Bytes = npt.NDArray[np.uint8]
_BYTE = np.dtype(np.uint8)


class KvBuffer:
    """Registered memory as uint8. A slice of it is memory too, and keeps the whole alive."""

    def __init__(self, data: Bytes) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, part: slice) -> "KvBuffer":
        if not isinstance(part, slice) or part.step not in (None, 1):
            raise invalid_argument("buffer", "is cut by slices without a step, as buffer[0:4096]")
        return KvBuffer(self.data[part])


def pieces_of(name: str, value: object, is_written: bool) -> list[Bytes]:
    """The memory of one value: one piece, or a list of pieces in order. is_written: it is a target. Raises
    EmsException(EMS_INVALID_ARGUMENT) that calls it `name`.
    """
    parts = list(value) if isinstance(value, list | tuple) else [value]
    pieces = [bytes_of(name, part, is_written) for part in parts]
    if not sum(map(len, pieces)):
        raise invalid_argument(name, "is empty; a value has at least one byte")
    return pieces


def bytes_of(name: str, value: object, is_written: bool) -> Bytes:
    """The memory of a buffer, array, tensor or KvBufferWrapper as uint8. Raises an error that calls it `name`."""
    if isinstance(value, np.ndarray):
        data = _of_array(name, value)
    elif isinstance(value, KvBuffer):
        data = value.data
    elif isinstance(value, KvBufferWrapper):
        data = np.frombuffer(value.view(), np.uint8)
    elif isinstance(value, bytes | bytearray | memoryview):
        data = _of_buffer(name, value)
    else:
        data = _of_array(name, _as_array(name, value))
    if is_written and not data.flags.writeable:
        raise invalid_argument(name, "can only be read; a get writes to it")
    return data


def _of_buffer(name: str, value: Any) -> Bytes:
    try:
        view = memoryview(value)
    except ValueError:
        raise invalid_argument(name, "is a memoryview that was released") from None
    if not view.c_contiguous:
        raise invalid_argument(name, "is not contiguous")
    return np.frombuffer(view.cast("B") if view.nbytes else b"", np.uint8)


def _as_array(name: str, value: Any) -> npt.NDArray[Any]:
    """A torch tensor as bytes of its own shape, because numpy lacks some of torch's types."""
    torch = imported_torch()
    if torch is not None and isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise invalid_argument(name, f"is on {value.device}; values are moved from and to host memory")
        if not is_in_memory(value, torch):
            raise invalid_argument(name, NOT_IN_MEMORY)
        if not value.is_contiguous():
            raise invalid_argument(name, "is not contiguous; call .contiguous() on it, or give its parts as a list")
        array: npt.NDArray[Any] = value.detach().view(-1).view(torch.uint8).numpy()
        return array
    try:
        return np.from_dlpack(value) if hasattr(value, "__dlpack__") else np.asarray(memoryview(value))
    except (TypeError, BufferError, RuntimeError, ValueError):
        kinds = "bytes, a buffer, array, tensor or KvBufferWrapper, or a list of those"
        raise invalid_argument(name, f"must be {kinds}, got {type(value).__name__}") from None


def _of_array(name: str, array: npt.NDArray[Any]) -> Bytes:
    if array.dtype.hasobject:
        raise invalid_argument(name, "has elements that are Python objects")
    if not array.flags.c_contiguous:
        raise invalid_argument(
            name, "is not contiguous; call numpy.ascontiguousarray on it, or give its parts as a list"
        )
    return array if array.ndim == 1 and array.dtype is _BYTE else np.asarray(array).reshape(-1).view(np.uint8)


def check_apart(name: str, values: Sequence[Sequence[Bytes]]) -> None:
    """Raises EmsException(EMS_INVALID_ARGUMENT) where two pieces overlap: both would be written. name: for the
    error.
    """
    pieces = [(piece, number) for number, pieces in enumerate(values) for piece in pieces if len(piece)]
    starts = addresses_of([piece for piece, _number in pieces])
    ends = starts + [len(piece) for piece, _number in pieces]
    order = np.argsort(starts)
    if not (starts[order][1:] < ends[order][:-1]).any():
        return
    spans = sorted((start, len(piece), number) for start, (piece, number) in zip(starts.tolist(), pieces, strict=True))
    for (start, size, before), (following, _size, number) in pairwise(spans):
        if following < start + size:
            one, other = sorted((before, number))
            whose = f"{name}[{one}]" if one != other else "itself"
            raise invalid_argument(f"{name}[{other}]", f"overlaps {whose}; each value is written to memory of its own")


def copy_in(pieces: Sequence[Bytes], target: Bytes) -> None:
    """Fills `target` with the pieces, one after the other."""
    position = 0
    for piece in pieces:
        target[position : position + len(piece)] = piece
        position += len(piece)


def copy_out(source: Bytes, pieces: Sequence[Bytes]) -> None:
    """Fills the pieces from `source`, one after the other."""
    position = 0
    for piece in pieces:
        piece[:] = source[position : position + len(piece)]
        position += len(piece)
