"""Positions of blocks' tokens in the registered cache, and of their bytes in shared memory."""

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Numbers: TypeAlias = npt.NDArray[np.int64]
Run = tuple[int, int, int]  # contiguous tokens: block of the caller's cache, first token in it, number
SKIPPED = -1  # not a block: tokens of a saved block that a load skips
Block = tuple[tuple[Run, ...], ...]  # a block's runs in each layer group, or in the only one


class Blocks(Sequence[Block]):
    """Blocks as arrays, which batches use, and as single `Block`s.

    runs [runs, 3] int64; edges [blocks * groups + 1] int64: index of the first run of each block and layer group.
    """

    def __init__(self, runs: Numbers, edges: Numbers, num_groups: int = 1) -> None:
        self.runs = runs
        self.edges = edges
        self.num_groups = num_groups

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> "Blocks":
        """The same as arrays. All have the same number of groups."""
        groups = [group for block in blocks for group in block]
        runs = np.array(list(chain.from_iterable(groups)), np.int64).reshape(-1, 3)
        edges = np.cumsum([0, *map(len, groups)], dtype=np.int64)
        return cls(runs, edges, len(blocks[0]) if blocks else 1)

    def __len__(self) -> int:
        return (len(self.edges) - 1) // self.num_groups

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> "Blocks": ...
    def __getitem__(self, index: int | slice) -> "Block | Blocks":
        count = self.num_groups
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            assert step == 1, "blocks of a chain are taken in a row"
            return Blocks(self.runs, self.edges[start * count : max(start, stop) * count + 1], count)
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        first = index % len(self) * count
        edges = self.edges[first : first + count + 1].tolist()
        return tuple(tuple(map(_as_run, self.runs[start:end].tolist())) for start, end in pairwise(edges))

    def __iter__(self) -> Iterator[Block]:
        return map(self.__getitem__, range(len(self)))


def _as_run(values: list[int]) -> Run:
    number, start, count = values
    return number, start, count


class Areas(Sequence[Bytes]):
    """Pieces of a few large memories, by number, offset and length in bytes: [areas] each."""

    def __init__(
        self,
        memories: Mapping[int, Bytes],
        numbers: Sequence[int] | Numbers,
        offsets: Sequence[int] | Numbers,
        lengths: Sequence[int] | Numbers,
    ) -> None:
        self._memories = memories
        self._numbers = numbers
        self._offsets = offsets
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Bytes: ...
    @overload
    def __getitem__(self, index: slice) -> "Areas": ...
    def __getitem__(self, index: int | slice) -> "Bytes | Areas":
        if isinstance(index, slice):
            return Areas(self._memories, self._numbers[index], self._offsets[index], self.lengths[index])
        offset = self._offsets[index]
        return self._memories[self._numbers[index]][offset : offset + self.lengths[index]]

    def are_within(self) -> bool:
        """Whether all lie within their memories."""
        sizes = self._of_memories({number: len(memory) for number, memory in self._memories.items()})
        offsets, lengths = np.asarray(self._offsets, np.int64), np.asarray(self.lengths, np.int64)
        return bool(((offsets >= 0) & (lengths >= 0) & (lengths <= sizes) & (offsets <= sizes - lengths)).all())

    def addresses(self) -> Numbers:
        """Start of each in this process, [areas]."""
        bases = {number: address_of(memory) for number, memory in self._memories.items()}
        return np.asarray(self._offsets, np.int64) + self._of_memories(bases)

    def _of_memories(self, values: Mapping[int, int]) -> Numbers | int:
        """Each area's memory's value; a single one when there is one memory."""
        if len(values) == 1:
            return next(iter(values.values()))
        return np.array([values[int(number)] for number in self._numbers], np.int64)


def addresses_of(areas: Iterable[Bytes]) -> Numbers:
    """Start of each in this process, [areas]."""
    return areas.addresses() if isinstance(areas, Areas) else np.array(list(map(address_of, areas)), np.int64)


def address_of(memory: npt.NDArray[np.generic]) -> int:
    """Start of an array in this process."""
    buffer: Any = memory  # numpy declares itself a buffer from Python 3.12 on
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))  # takes a third of the time of the alternative
    except (TypeError, ValueError, BufferError):  # empty, read-only, with gaps, or of a type without buffer support
        address: int = memory.__array_interface__["data"][0]
        return address
