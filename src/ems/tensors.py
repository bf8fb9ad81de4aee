"""Tensors of torch, numpy, and others by DLPack. None of them is copied.

torch is not imported here: a caller with a torch tensor has imported it.
"""

import math
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from ems.common.exception import invalid_argument

Bytes = npt.NDArray[np.uint8]
_HOST_DEVICES = (1, 3)  # DLPack's kDLCPU, kDLCUDAHost
NOT_IN_MEMORY = "is sparse, nested or conjugated, or its memory was freed; expected a dense tensor"
_SAME_SIZE = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}  # numpy has no bfloat16


@dataclass(frozen=True, slots=True)
class Tensor:
    """How to read a tensor's blocks. strides: bytes; data: a numpy array on the host, else a torch tensor."""

    dtype: str
    device: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    data: Any

    @property
    def token_bytes(self) -> int:
        """Of one token of one block."""
        return math.prod(self.shape[2:]) * self.item_bytes

    @property
    def block_bytes(self) -> int:
        return self.shape[1] * self.token_bytes

    @property
    def has_whole_blocks(self) -> bool:
        """Whether the tokens of a block are contiguous."""
        expected = self.item_bytes
        for size, stride in reversed(list(zip(self.shape[1:], self.strides[1:], strict=True))):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True

    def flat(self) -> Bytes:
        """The memory from the first block to the end of the last, gaps included; on the host only."""
        size = (self.shape[0] - 1) * self.strides[0] + self.block_bytes
        items = np.lib.stride_tricks.as_strided(self.data, (size // self.item_bytes,), (self.item_bytes,))
        return items.view(np.uint8)


def imported_torch() -> ModuleType | None:
    """torch, if it has been imported."""
    return sys.modules.get("torch")


def as_tensor(name: str, value: object) -> Tensor | None:
    """`value` as a tensor; None when it is not one. Raises EmsException(EMS_INVALID_ARGUMENT) that calls it `name`."""
    torch = imported_torch()
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_torch(name, value.detach(), torch)
    if isinstance(value, np.ndarray):
        return _of_numpy(name, value)
    return _of_dlpack(name, value, torch) if hasattr(value, "__dlpack_device__") else None


def is_in_memory(tensor: Any, torch: ModuleType) -> bool:
    """Whether memory holds a torch tensor's elements as its shape and strides say: it is not sparse or nested, no
    view that torch conjugates or negates, and its storage was not freed.
    """
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
        return False
    try:
        held = tensor.untyped_storage().nbytes()
    except RuntimeError:  # it only stands for a tensor
        return False
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return bool(tensor.numel() == 0 or (tensor.storage_offset() + last + 1) * tensor.element_size() <= held)


def _of_torch(name: str, tensor: Any, torch: ModuleType) -> Tensor:
    if not is_in_memory(tensor, torch):
        raise invalid_argument("kvcache", f"{name} {NOT_IN_MEMORY}")
    dtype, item_bytes, data = str(tensor.dtype).removeprefix("torch."), tensor.element_size(), tensor
    if tensor.device.type == "cpu":
        data = (
            tensor.view(getattr(torch, _SAME_SIZE[item_bytes])).numpy() if item_bytes in _SAME_SIZE else tensor.numpy()
        )
    strides = tuple(stride * item_bytes for stride in tensor.stride())
    return Tensor(dtype, str(tensor.device), tuple(tensor.shape), strides, item_bytes, data)


def _of_numpy(name: str, array: npt.NDArray[Any]) -> Tensor:
    if array.dtype.hasobject or array.dtype.names is not None or not array.dtype.isnative:
        raise invalid_argument(
            "kvcache", f"{name} has elements of {array.dtype}, expected numbers in this machine's order"
        )
    if not array.flags.writeable:
        raise invalid_argument("kvcache", f"{name} can only be read; loads write to it")
    return Tensor(array.dtype.name, "cpu", array.shape, array.strides, array.itemsize, array)


def _of_dlpack(name: str, value: Any, torch: ModuleType | None) -> Tensor:
    """Through numpy; through torch, if imported, for what numpy does not support."""
    device, _index = value.__dlpack_device__()
    try:
        if device in _HOST_DEVICES:
            return _of_numpy(name, np.from_dlpack(value))
    except (BufferError, RuntimeError, TypeError) as error:
        if torch is None:
            raise invalid_argument("kvcache", f"{name} cannot be seen through DLPack: {error}") from None
    if torch is None:
        raise invalid_argument("kvcache", f"{name} is on a device (DLPack's {device}); import torch to register it")
    return _of_torch(name, torch.from_dlpack(value), torch)
