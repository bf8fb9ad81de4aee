"""The registered KV cache: what its tensors look like, and how blocks are gathered from and scattered into them."""

import ctypes
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ems.blocks import Block
from ems.common.exception import internal_error, invalid_argument
from ems.keys import Layout

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class KvBufferWrapper:
    """A piece of host memory by address (interfaces before V1). `length` in bytes; the memory stays the caller's."""

    data_ptr: int
    length: int

    def __post_init__(self) -> None:
        if self.data_ptr <= 0:
            raise invalid_argument("data_ptr", "must be the address of a buffer")
        if self.length <= 0:
            raise invalid_argument("length", "must be positive")

    def view(self) -> memoryview:
        """The memory itself, writable."""
        return memoryview((ctypes.c_ubyte * self.length).from_address(self.data_ptr)).cast("B")


class Gatherer(Protocol):
    """Has the bytes of blocks."""

    def gather(self, blocks: Sequence[Block], targets: Sequence[Bytes]) -> None:
        """Fills each target with its block's bytes."""
        ...


class Tensors(Gatherer, Protocol):
    """Moves blocks between registered tensors and host memory. `batch` is how many blocks it likes at once."""

    batch: int

    def scatter(self, blocks: Sequence[Block], sources: Sequence[Bytes]) -> None:
        """Writes each source to its block's tokens."""
        ...


class RegisteredCache:
    """A checked KV cache. `layout` goes into every key; `token_bytes` is what one token takes over all tensors."""

    def __init__(self, kvcache: object) -> None:
        """kvcache: per layer a list of tensors [blocks, block_size, heads, head_size] (MLA: [blocks, block_size, dim]).

        Raises EmsException(EMS_INVALID_ARGUMENT) naming the tensor that does not fit.
        """
        tensors = _flatten(kvcache)
        first = tensors[0]
        for name, tensor in ((f"kvcache tensor {i}", tensor) for i, tensor in enumerate(tensors)):
            _check_tensor(name, tensor, first)
        if first.device.type not in ("cpu", "cuda", "npu"):
            raise invalid_argument("kvcache", f"tensors on {first.device.type} are not supported")
        if first.device.type == "npu" and importlib.util.find_spec("torch_npu") is None:
            raise invalid_argument("kvcache", "tensors on an NPU need torch_npu")
        self.num_blocks, self.block_size = first.shape[0], first.shape[1]
        shapes = tuple(tuple(int(n) for n in tensor.shape[2:]) for tensor in tensors)
        self.layout = Layout(str(first.dtype).removeprefix("torch."), self.block_size, shapes)
        widths = [tensor[0, 0].numel() * tensor.element_size() for tensor in tensors]
        self.token_bytes = sum(widths)
        if first.device.type == "cpu":
            self.tensors: Tensors = HostTensors(tensors, widths)
        else:
            self.tensors = DeviceTensors(tensors, widths)

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size


class Snapshot:
    """A copy of some blocks, which may be saved while the cache they come from changes."""

    def __init__(self, cache: RegisteredCache, blocks: Sequence[Block]) -> None:
        self.token_bytes = cache.token_bytes
        self.num_bytes = sum(block.num_tokens for block in blocks) * cache.token_bytes
        copies = [np.empty(block.num_tokens * cache.token_bytes, np.uint8) for block in blocks]
        cache.tensors.gather(blocks, copies)
        self._copies = {block.pieces: copy for block, copy in zip(blocks, copies, strict=True)}

    @property
    def tensors(self) -> Gatherer:
        return self

    def gather(self, blocks: Sequence[Block], targets: Sequence[Bytes]) -> None:
        for block, target in zip(blocks, targets, strict=True):
            target[:] = self._copies[block.pieces]


def _flatten(kvcache: object) -> list[torch.Tensor]:
    if not isinstance(kvcache, list | tuple) or not kvcache:
        raise invalid_argument("kvcache", "must be a list of layers, each a list of tensors")
    for layer in kvcache:
        if not isinstance(layer, list | tuple) or not layer or not all(isinstance(t, torch.Tensor) for t in layer):
            raise invalid_argument("kvcache", "must be a list of layers, each a list of tensors")
    return [tensor for layer in kvcache for tensor in layer]


def _check_tensor(name: str, tensor: torch.Tensor, first: torch.Tensor) -> None:
    if tensor.ndim < 3:
        shape = "[blocks, block_size, heads, head_size] or [blocks, block_size, dim]"
        raise invalid_argument("kvcache", f"{name} has {tensor.ndim} dimensions, expected {shape}")
    if 0 in tensor.shape:
        raise invalid_argument("kvcache", f"{name} is empty")
    if tensor.shape[:2] != first.shape[:2]:
        raise invalid_argument("kvcache", f"{name} has other blocks or block_size than the first tensor")
    if tensor.dtype != first.dtype or tensor.device != first.device:
        raise invalid_argument("kvcache", f"{name} has another dtype or device than the first tensor")
    if not tensor[0].is_contiguous():
        raise invalid_argument("kvcache", f"{name}: the tokens of a block must be contiguous")


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the same memory as uint8 [blocks, bytes of a block]; the blocks may be apart."""
    row = tensor[0].numel()
    flat = tensor.detach().as_strided((tensor.shape[0], row), (tensor.stride(0), 1))
    return flat.view(torch.uint8)


class HostTensors:
    """Tensors in host memory: plain copies, which release the interpreter lock."""

    batch = 1  # a block that was just verified is still in the processor's cache when it is copied

    def __init__(self, tensors: list[torch.Tensor], widths: list[int]) -> None:
        self._rows: list[tuple[Bytes, int]] = [
            (_rows(tensor).numpy(), width) for tensor, width in zip(tensors, widths, strict=True)
        ]

    def gather(self, blocks: Sequence[Block], targets: Sequence[Bytes]) -> None:
        for block, target in zip(blocks, targets, strict=True):
            position = 0
            for rows, width in self._rows:
                for piece in block.pieces:
                    size = piece.num_tokens * width
                    start = piece.start * width
                    target[position : position + size] = rows[piece.block, start : start + size]
                    position += size

    def scatter(self, blocks: Sequence[Block], sources: Sequence[Bytes]) -> None:
        for block, source in zip(blocks, sources, strict=True):
            position = 0
            for rows, width in self._rows:
                for piece in block.pieces:
                    size = piece.num_tokens * width
                    start = piece.start * width
                    rows[piece.block, start : start + size] = source[position : position + size]
                    position += size


class DeviceTensors:
    """Tensors on an accelerator: a batch is packed on the device, then crosses the bus in one copy.

    Works on any torch device; the host side of the copy is pinned where the device is CUDA.
    """

    batch = 16

    def __init__(self, tensors: list[torch.Tensor], widths: list[int]) -> None:
        self._rows = [(_rows(tensor), width) for tensor, width in zip(tensors, widths, strict=True)]
        self._device = tensors[0].device

    def gather(self, blocks: Sequence[Block], targets: Sequence[Bytes]) -> None:
        try:
            self._synchronize()  # what the caller computes on its streams must be there before it is read
            packed = torch.empty(sum(len(target) for target in targets), dtype=torch.uint8, device=self._device)
            for device_part, rows_part in self._parts(blocks, packed):
                device_part.copy_(rows_part)
            host = self._host(packed.numel())
            host.copy_(packed)
        except RuntimeError as error:
            raise internal_error(f"device memory: {error}") from error
        data, position = host.numpy(), 0
        for target in targets:
            target[:] = data[position : position + len(target)]
            position += len(target)

    def scatter(self, blocks: Sequence[Block], sources: Sequence[Bytes]) -> None:
        try:
            host = self._host(sum(len(source) for source in sources))
            data, position = host.numpy(), 0
            for source in sources:
                data[position : position + len(source)] = source
                position += len(source)
            packed = host.to(self._device)
            for device_part, rows_part in self._parts(blocks, packed):
                rows_part.copy_(device_part)
            self._synchronize()  # the caller may use the cache on any stream afterwards
        except RuntimeError as error:
            raise internal_error(f"device memory: {error}") from error

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _parts(self, blocks: Sequence[Block], packed: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of equal size: a range of `packed`, and the tokens of the cache it stands for."""
        parts, position = [], 0
        for block in blocks:
            for rows, width in self._rows:
                for piece in block.pieces:
                    size, start = piece.num_tokens * width, piece.start * width
                    parts.append((packed[position : position + size], rows[piece.block, start : start + size]))
                    position += size
        return parts

    def _host(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
