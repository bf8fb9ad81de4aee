"""The registered KV cache: what its tensors look like, and how blocks are gathered from and scattered into them."""

import ctypes
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ems.blocks import Block, Request
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
    """Moves blocks between registered tensors and host memory. `batch_bytes` is how much it likes at once."""

    batch_bytes: int

    def scatter(self, blocks: Sequence[Block], sources: Sequence[Bytes]) -> None:
        """Writes each source to its block's tokens."""
        ...


class RegisteredCache:
    """A checked KV cache. `layout` goes into every key; `token_bytes` is what one token takes over all tensors."""

    def __init__(self, kvcache: object, layer_groups: object = None) -> None:
        """kvcache: per layer a list of tensors [blocks, block_size, heads, head_size] (MLA: [blocks, block_size, dim]).

        layer_groups: lists of layer numbers, every layer once; groups may differ in blocks and block_size.
        Raises EmsException(EMS_INVALID_ARGUMENT) naming the tensor that does not fit.
        """
        layers = _layers(kvcache)
        of_layer = _group_of_layer(layer_groups, len(layers))
        tensors = [tensor for layer in layers for tensor in layer]
        group_of = [group for layer, group in zip(layers, of_layer, strict=True) for _tensor in layer]
        first = tensors[0]
        for i, tensor in enumerate(tensors):
            _check_tensor(f"kvcache tensor {i}", tensor, first, tensors[group_of.index(group_of[i])])
        if first.device.type not in ("cpu", "cuda", "npu"):
            raise invalid_argument("kvcache", f"tensors on {first.device.type} are not supported")
        if first.device.type == "npu" and importlib.util.find_spec("torch_npu") is None:
            raise invalid_argument("kvcache", "tensors on an NPU need torch_npu")
        self.num_blocks, self.block_size = first.shape[0], first.shape[1]
        shapes = tuple(tuple(int(n) for n in tensor.shape[2:]) for tensor in tensors)
        heads = [tensors[group_of.index(group)] for group in range(max(group_of) + 1)]
        self.groups = tuple((t.shape[1], t.shape[0] * t.shape[1]) for t in heads) if layer_groups is not None else ()
        per_tensor = tuple((group, int(heads[group].shape[1])) for group in group_of) if self.groups else ()
        self.layout = Layout(str(first.dtype).removeprefix("torch."), self.block_size, shapes, per_tensor)
        widths = [tensor[0, 0].numel() * tensor.element_size() for tensor in tensors]
        self.token_bytes = sum(widths)
        self._group_bytes = [
            sum(width for width, group in zip(widths, group_of, strict=True) if group == number)
            for number in range(len(heads))
        ]
        if first.device.type == "cpu":
            self.tensors: Tensors = HostTensors(tensors, widths, group_of)
        else:
            self.tensors = DeviceTensors(tensors, widths, group_of)

    def sizes(self, request: Request) -> list[int]:
        """Bytes of each block."""
        if len(self._group_bytes) == 1:
            return [count * self.token_bytes for count in request.tokens[0]]
        return [
            sum(count * width for count, width in zip(counts, self._group_bytes, strict=True))
            for counts in zip(*request.tokens, strict=True)
        ]

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size


class Snapshot:
    """A copy of some blocks, which may be saved while the cache they come from changes."""

    def __init__(self, cache: RegisteredCache, request: Request) -> None:
        self.sizes = cache.sizes
        copies = [np.empty(size, np.uint8) for size in cache.sizes(request)]
        self.num_bytes = sum(map(len, copies))
        cache.tensors.gather(request.blocks, copies)
        self._copies = dict(zip(request.blocks, copies, strict=True))

    @property
    def tensors(self) -> Gatherer:
        return self

    def gather(self, blocks: Sequence[Block], targets: Sequence[Bytes]) -> None:
        for block, target in zip(blocks, targets, strict=True):
            target[:] = self._copies[block]


def _layers(kvcache: object) -> list[list[torch.Tensor]]:
    if not isinstance(kvcache, list | tuple) or not kvcache:
        raise invalid_argument("kvcache", "must be a list of layers, each a list of tensors")
    for layer in kvcache:
        if not isinstance(layer, list | tuple) or not layer or not all(isinstance(t, torch.Tensor) for t in layer):
            raise invalid_argument("kvcache", "must be a list of layers, each a list of tensors")
    return [list(layer) for layer in kvcache]


def _group_of_layer(layer_groups: object, num_layers: int) -> list[int]:
    """The group of each layer; 0 for all when there are no groups."""
    if layer_groups is None:
        return [0] * num_layers
    name = "store_layer_group_desc"
    if not isinstance(layer_groups, list | tuple) or not layer_groups:
        raise invalid_argument(name, "must be a list of groups, each a list of layer numbers")
    found: dict[int, int] = {}
    for number, group in enumerate(layer_groups):
        if not isinstance(group, list | tuple) or not group:
            raise invalid_argument(name, "must be a list of groups, each a list of layer numbers")
        for layer in group:
            if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < num_layers or layer in found:
                raise invalid_argument(name, f"must name each of the layers 0 to {num_layers - 1} once, got {layer!r}")
            found[layer] = number
    if len(found) < num_layers:
        raise invalid_argument(name, f"must name each of the layers 0 to {num_layers - 1} once")
    return [found[layer] for layer in range(num_layers)]


def _check_tensor(name: str, tensor: torch.Tensor, first: torch.Tensor, head: torch.Tensor) -> None:
    """first: of all tensors; head: of the tensor's layer group."""
    if tensor.ndim < 3:
        shape = "[blocks, block_size, heads, head_size] or [blocks, block_size, dim]"
        raise invalid_argument("kvcache", f"{name} has {tensor.ndim} dimensions, expected {shape}")
    if 0 in tensor.shape:
        raise invalid_argument("kvcache", f"{name} is empty")
    if tensor.shape[:2] != head.shape[:2]:
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


def _flat(tensor: torch.Tensor) -> Bytes:
    """The memory from the first block to the end of the last, with what lies between blocks."""
    size = (tensor.shape[0] - 1) * tensor.stride(0) + tensor[0].numel()
    flat: Bytes = tensor.detach().as_strided((size,), (1,)).view(torch.uint8).numpy()
    return flat


def _stride_bytes(tensor: torch.Tensor) -> int:
    """From block to block."""
    return tensor.stride(0) * tensor.element_size()


class HostTensors:
    """Tensors in host memory: plain copies, which release the interpreter lock."""

    batch_bytes = 256 << 10  # what was just verified is still in the processor's cache when it is copied

    def __init__(self, tensors: list[torch.Tensor], widths: list[int], group_of: list[int]) -> None:
        self._parts = list(zip(map(_flat, tensors), map(_stride_bytes, tensors), widths, group_of, strict=True))

    def gather(self, blocks: Sequence[Block], targets: Sequence[Bytes]) -> None:
        for block, target in zip(blocks, targets, strict=True):
            position = 0
            for data, stride, width, group in self._parts:
                for number, start, count in block[group]:
                    size, place = count * width, number * stride + start * width
                    target[position : position + size] = data[place : place + size]
                    position += size

    def scatter(self, blocks: Sequence[Block], sources: Sequence[Bytes]) -> None:
        for block, source in zip(blocks, sources, strict=True):
            position = 0
            for data, stride, width, group in self._parts:
                for number, start, count in block[group]:
                    size, place = count * width, number * stride + start * width
                    data[place : place + size] = source[position : position + size]
                    position += size


class DeviceTensors:
    """Tensors on an accelerator: a batch is packed on the device, then crosses the bus in one copy.

    Works on any torch device; the host side of the copy is pinned where the device is CUDA.
    """

    batch_bytes = 32 << 20

    def __init__(self, tensors: list[torch.Tensor], widths: list[int], group_of: list[int]) -> None:
        self._rows = list(zip(map(_rows, tensors), widths, group_of, strict=True))
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
            for rows, width, group in self._rows:
                for number, start, count in block[group]:
                    size, first = count * width, start * width
                    parts.append((packed[position : position + size], rows[number, first : first + size]))
                    position += size
        return parts

    def _host(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
