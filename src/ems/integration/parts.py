"""An engine's KV tensors (torch) as blocks of bytes."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class BlockParts:
    """The cache as uint8 [num_blocks, 1, bytes]: one part for each piece of memory in which a block is contiguous.

    layers: the part numbers of each layer; names: the layer number of each name; several names may share one.
    """

    parts: list[torch.Tensor]
    arrangement: str
    layers: list[range]
    names: dict[str, int]

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(part.shape[2] for part in self.parts)


def split_blocks(caches: Mapping[str, torch.Tensor], num_blocks: int) -> BlockParts:
    """Views of an engine's KV tensors by block, whatever the order of dimensions inside one.

    caches: by layer; a tensor has one dimension of `num_blocks` (or a multiple: smaller blocks for the kernels), and in
    front of it at most K and V. Tensors that several layers share count once. Raises ValueError for any other memory.
    """
    parts: list[torch.Tensor] = []
    about: list[str] = []
    layers: list[range] = []
    seen: dict[tuple[int, torch.Size], int] = {}
    names: dict[str, int] = {}
    for name, tensor in caches.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name}: a KV cache of {type(tensor).__name__} is not supported")
        names[name] = seen.setdefault((tensor.data_ptr(), tensor.shape), len(layers))
        if names[name] < len(layers):
            continue
        if num_blocks <= 2:
            raise ValueError(f"{name}: a cache of {num_blocks} blocks cannot be told from K and V")
        dim = next((i for i, n in enumerate(tensor.shape[:2]) if n % num_blocks == 0 and n >= num_blocks), None)
        if dim is None or (dim == 1 and tensor.shape[0] > 2):
            raise ValueError(f"{name}: shape {list(tensor.shape)} has no dimension of {num_blocks} blocks")
        halves = [tensor] if dim == 0 else list(tensor)
        layers.append(range(len(parts), len(parts) + len(halves)))
        parts += [_rows(name, half, num_blocks) for half in halves]
        about.append(f"{tensor.dtype}{list(tensor.shape[dim + 1 :])}{list(tensor.stride()[dim + 1 :])}")
    return BlockParts(parts, "|".join(about), layers, names)


def _rows(name: str, tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """uint8 [num_blocks, 1, bytes] over the same memory."""
    ratio, row = tensor.shape[0] // num_blocks, tensor[0].numel()
    extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    if extent != row or (ratio > 1 and tensor.stride(0) != row):
        raise ValueError(f"{name}: the bytes of a block do not lie together")
    size = (num_blocks, 1, ratio * row)
    stride = (ratio * tensor.stride(0), ratio * row, 1)
    return tensor.as_strided(size, stride).view(torch.uint8)
