"""The registered KV cache: its tensors, and how blocks are gathered from and scattered into them."""

import ctypes
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from ems.blocks import Request
from ems.checked import Checked
from ems.common.exception import invalid_argument
from ems.device import DeviceTensors
from ems.keys import Layout
from ems.native.tensors import native_tensors
from ems.runs import SKIPPED, Block, Bytes, Numbers
from ems.tensors import Tensor, as_tensor

_MAX_ADDRESS = 2**63


@dataclass(frozen=True, slots=True)
class KvBufferWrapper:
    """A piece of host memory by address (interfaces before V1). `length` in bytes; the memory stays the caller's."""

    data_ptr: int
    length: int

    def __post_init__(self) -> None:
        if not isinstance(self.data_ptr, int) or not 0 < self.data_ptr < _MAX_ADDRESS:
            raise invalid_argument("data_ptr", "must be the address of a buffer")
        if not isinstance(self.length, int) or self.length <= 0:
            raise invalid_argument("length", "must be a positive number of bytes")
        if self.length > _MAX_ADDRESS - self.data_ptr:
            raise invalid_argument("length", "reaches beyond the memory that a process may have")

    def view(self) -> memoryview:
        """The memory itself, writable."""
        return memoryview((ctypes.c_ubyte * self.length).from_address(self.data_ptr)).cast("B")


class Gatherer(Protocol):
    """Can copy the bytes of blocks."""

    def gather(self, blocks: Sequence[Block], targets: Sequence[Bytes]) -> None:
        """Fills each target with its block's bytes."""
        ...

    def gather_summed(self, blocks: Sequence[Block], targets: Sequence[Bytes]) -> bytes:
        """As `gather`; returns the checksums of what the targets hold then, 16 bytes each."""
        ...


class Tensors(Gatherer, Protocol):
    """Moves blocks between registered tensors and host memory. `batch_bytes`: the preferred amount at once."""

    batch_bytes: int

    def scatter(self, blocks: Sequence[Block], sources: Sequence[Bytes]) -> None:
        """Writes each source to its block's tokens."""
        ...

    def scatter_checked(self, blocks: Sequence[Block], sources: Sequence[Bytes], sums: bytes) -> int:
        """As `scatter`, up to the first source whose checksum differs. Returns how many were written."""
        ...


class RegisteredCache:
    """A checked KV cache. `layout` is part of every key; `token_bytes` is the size of one token over all tensors."""

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
            _check_tensor(f"tensor {i}", tensor, first, tensors[group_of.index(group_of[i])])
        kind = first.device.partition(":")[0]
        if kind not in ("cpu", "cuda", "npu"):
            raise invalid_argument("kvcache", f"tensors on {kind} are not supported")
        if kind == "npu" and importlib.util.find_spec("torch_npu") is None:
            raise invalid_argument("kvcache", "tensors on an NPU need torch_npu")
        self.num_blocks, self.block_size = first.shape[0], first.shape[1]
        heads = [tensors[group_of.index(group)] for group in range(max(group_of) + 1)]
        self.groups = tuple((t.shape[1], t.shape[0] * t.shape[1]) for t in heads) if layer_groups is not None else ()
        per_tensor = tuple((group, heads[group].shape[1]) for group in group_of) if self.groups else ()
        self.layout = Layout(first.dtype, self.block_size, tuple(tensor.shape[2:] for tensor in tensors), per_tensor)
        widths = [tensor.token_bytes for tensor in tensors]
        self.token_bytes = sum(widths)
        self._group_bytes = [
            sum(width for width, group in zip(widths, group_of, strict=True) if group == number)
            for number in range(len(heads))
        ]
        if kind == "cpu":
            self.tensors: Tensors = native_tensors(tensors, group_of) or HostTensors(tensors, group_of)
        else:
            self.tensors = DeviceTensors([tensor.data for tensor in tensors], widths, group_of)

    def sizes(self, request: Request) -> Numbers:
        """Bytes of each block."""
        return np.array(self._group_bytes, np.int64) @ np.array(request.tokens, np.int64)

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size


class Snapshot(Checked):
    """A copy of some blocks, which may be saved while the cache they come from changes."""

    def __init__(self, cache: RegisteredCache, request: Request) -> None:
        self.sizes = cache.sizes
        self.copies: list[Bytes] = [np.empty(size, np.uint8) for size in cache.sizes(request).tolist()]
        """The bytes of each block, in order."""
        self.num_bytes = sum(map(len, self.copies))
        cache.tensors.gather(request.blocks, self.copies)
        self._blocks = request.blocks

    @property
    def tensors(self) -> Gatherer:
        return self

    def gather(self, blocks: Sequence[Block], targets: Sequence[Bytes]) -> None:
        for block, target in zip(blocks, targets, strict=True):
            target[:] = self._of_block[block]

    @cached_property
    def _of_block(self) -> dict[Block, Bytes]:
        return dict(zip(self._blocks, self.copies, strict=True))

    def scatter(self, blocks: Sequence[Block], sources: Sequence[Bytes]) -> None:
        raise AssertionError("a copy is saved, not loaded")


def _layers(kvcache: object) -> list[list[Tensor]]:
    problem = invalid_argument("kvcache", "must be a list of layers, each a list of tensors")
    if not isinstance(kvcache, list | tuple) or not kvcache:
        raise problem
    layers: list[list[Tensor]] = []
    for layer in kvcache:
        if not isinstance(layer, list | tuple) or not layer:
            raise problem
        count = sum(map(len, layers))
        tensors = [as_tensor(f"tensor {count + i}", value) for i, value in enumerate(layer)]
        layers.append([tensor for tensor in tensors if tensor is not None])
        if len(layers[-1]) < len(layer):
            raise problem
    return layers


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


def _check_tensor(name: str, tensor: Tensor, first: Tensor, head: Tensor) -> None:
    """first: of all tensors; head: of the tensor's layer group."""
    if len(tensor.shape) < 3:
        shape = "[blocks, block_size, heads, head_size] or [blocks, block_size, dim]"
        raise invalid_argument("kvcache", f"{name} has {len(tensor.shape)} dimensions, expected {shape}")
    if 0 in (*tensor.shape, tensor.item_bytes):
        raise invalid_argument("kvcache", f"{name} is empty")
    if tensor.shape[:2] != head.shape[:2]:
        raise invalid_argument("kvcache", f"{name} has other blocks or block_size than the first tensor")
    if tensor.dtype != first.dtype or tensor.device != first.device:
        raise invalid_argument("kvcache", f"{name} has another dtype or device than the first tensor")
    if not tensor.has_whole_blocks:
        raise invalid_argument("kvcache", f"{name}: the tokens of a block must be contiguous")
    if tensor.shape[0] > 1 and tensor.strides[0] < tensor.block_bytes:
        raise invalid_argument("kvcache", f"{name}: the memory of its blocks overlaps")


class HostTensors(Checked):
    """Tensors in host memory: plain copies, which release the interpreter lock."""

    batch_bytes = 256 << 10  # verified data is still in the processor's cache when it is copied

    def __init__(self, tensors: list[Tensor], group_of: list[int]) -> None:
        self._parts = [
            (t.flat(), t.strides[0], t.token_bytes, group) for t, group in zip(tensors, group_of, strict=True)
        ]

    def gather(self, blocks: Sequence[Block], targets: Sequence[Bytes]) -> None:
        for block, target in zip(blocks, targets, strict=True):
            position = 0
            for data, stride, width, group in self._parts:
                for number, start, count in block[group]:
                    size, offset = count * width, number * stride + start * width
                    target[position : position + size] = data[offset : offset + size]
                    position += size

    def scatter(self, blocks: Sequence[Block], sources: Sequence[Bytes]) -> None:
        for block, source in zip(blocks, sources, strict=True):
            position = 0
            for data, stride, width, group in self._parts:
                for number, start, count in block[group]:
                    size, offset = count * width, number * stride + start * width
                    if number != SKIPPED:
                        data[offset : offset + size] = source[position : position + size]
                    position += size
