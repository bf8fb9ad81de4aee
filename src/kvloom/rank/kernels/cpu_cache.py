"""The memory of keys and values of the CPU kernels: where each layer's lie in a block, and the blocks."""

import mmap
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvloom.checkpoints.families.spec import DecoderSpec
from kvloom.checkpoints.footprint import kv_layer_bytes
from kvloom.checkpoints.windows import windowed


class At(NamedTuple):
    """Where keys and values of a layer begin in a block, in bytes; of_windows: in one of a window's blocks."""

    keys: int
    values: int
    of_windows: bool
    end: int


class BlockShape:
    """What is where in a block of all tokens and in one of a window's."""

    def __init__(self, spec: DecoderSpec, kv_dtype: str, block_size: int, has_windows: bool) -> None:
        """`has_windows`: layers with a window have blocks of their own."""
        apart = windowed(spec) if has_windows else frozenset()
        self.block_bytes = [0, 0]  # of both
        self.at: dict[int, At] = {}
        for layer, own in spec.cached:
            keys, values = (block_size * side for side in kv_layer_bytes(kv_dtype, "cpu", own))
            first = self.block_bytes[layer in apart]
            self.at[layer] = At(first, first + keys, layer in apart, first + keys + values)
            self.block_bytes[layer in apart] += keys + values


def layers_of(blocks: npt.NDArray[np.uint8], at: Mapping[int, At], of_windows: bool) -> list[list[Any]]:
    """Keys and values of each layer that has them in `blocks` [blocks, bytes of a block]; keys alone where they are
    values, too.
    """
    own = [one for one in at.values() if one.of_windows == of_windows]
    sides = [[blocks[:, one.keys : one.values], blocks[:, one.values : one.end]] for one in own]
    return [[side for side in pair if side.shape[1]] for pair in sides]


def lazy_zeros(shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Zeroed memory that becomes resident when first written, in huge pages where the system has them.

    Private, because most systems have no huge pages for shared memory.
    """
    if not np.prod(shape):
        return np.zeros(shape, np.uint8)
    pages = mmap.mmap(-1, int(np.prod(shape)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8).reshape(shape)
