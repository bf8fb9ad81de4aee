"""NativeHostTensors: a batch between host tensors and the pool's memory in one call, without the interpreter lock."""

import ctypes
import logging
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from ems.native.build import BLOCKS
from ems.native.functions import Batch, Plan, functions
from ems.native.library import is_to_be_compiled, xxh3
from ems.runs import Areas, Blocks, Bytes, Numbers, address_of, addresses_of
from ems.tensors import Tensor

log = logging.getLogger("ems")
_SUM_BYTES = 16


class NativeHostTensors:
    """As `HostTensors`, in C++."""

    batch_bytes = 8 << 20  # copied between two checks of the deadline

    def __init__(self, library: ctypes.CDLL, tensors: list[Tensor], group_of: list[int]) -> None:
        self._library = library
        self._xxh3 = xxh3()
        self._memories = [tensor.flat() for tensor in tensors]  # keeps them alive
        rows = [
            (address_of(memory), tensor.strides[0], tensor.token_bytes, group)
            for memory, tensor, group in zip(self._memories, tensors, group_of, strict=True)
        ]
        self.table: Numbers = np.array(rows, np.int64)

    def gather(self, blocks: Sequence[tuple[object, ...]], targets: Sequence[Bytes]) -> None:
        self._gather(_as_blocks(blocks), targets, None)

    def gather_summed(self, blocks: Sequence[tuple[object, ...]], targets: Sequence[Bytes]) -> bytes:
        sums = np.empty((len(targets), _SUM_BYTES), np.uint8)
        self._gather(_as_blocks(blocks), targets, sums)
        return sums.tobytes()

    def _gather(self, blocks: Blocks, targets: Sequence[Bytes], sums: npt.NDArray[np.uint8] | None) -> None:
        addresses = addresses_of(targets)
        out = None if sums is None else address_of(sums)
        self._library.ems_gather(self.batch_of(blocks), address_of(addresses), self._xxh3, out)

    def scatter(self, blocks: Sequence[tuple[object, ...]], sources: Sequence[Bytes]) -> None:
        done = self._scatter(_as_blocks(blocks), sources, None)
        assert done == len(blocks), "a source is not as long as its block"

    def scatter_checked(self, blocks: Sequence[tuple[object, ...]], sources: Sequence[Bytes], sums: bytes) -> int:
        return self._scatter(_as_blocks(blocks), sources, sums)

    def _scatter(self, blocks: Blocks, sources: Sequence[Bytes], sums: bytes | None) -> int:
        assert len(blocks) == len(sources)
        assert sums is None or len(sums) == _SUM_BYTES * len(sources)
        addresses = addresses_of(sources)
        lengths = np.array(sources.lengths if isinstance(sources, Areas) else list(map(len, sources)), np.int64)
        batch = self.batch_of(blocks)
        done: int = self._library.ems_scatter(batch, address_of(addresses), address_of(lengths), self._xxh3, sums)
        return done

    def batch_of(self, blocks: Blocks) -> Batch:
        """The blocks for C++; keeps the arrays alive."""
        table, runs, edges = self.table, _contiguous(blocks.runs), _contiguous(blocks.edges)
        batch = Batch(
            address_of(table), len(table), blocks.num_groups, address_of(runs), address_of(edges), len(blocks)
        )
        batch.kept = runs, edges
        return batch

    def plan_of(self, blocks: Blocks, keys: bytes, sizes: Numbers) -> Plan:
        """The same as a plan. keys: packed; sizes [blocks] in bytes."""
        batch, names, sizes = self.batch_of(blocks), np.frombuffer(keys, np.uint8), _contiguous(sizes)
        plan = Plan(batch, address_of(names), address_of(sizes), int(sizes.max(initial=0)))
        plan.kept = batch.kept, names, sizes, self
        return plan


def plan_of_values(
    values: Sequence[Sequence[Bytes]], sizes: Sequence[int], names: Sequence[bytes], members: Sequence[int]
) -> Plan:
    """Some of the values as a plan. values: the pieces of each; sizes in bytes."""
    pieces = [piece for i in members for piece in values[i]]
    starts = addresses_of(pieces)
    base = int(starts.min())
    table = np.array([[base, 1, 1, 0]], np.int64)  # one tensor of one-byte blocks, which contains all pieces
    runs = np.zeros((len(pieces), 3), np.int64)
    runs[:, 0], runs[:, 2] = starts - base, list(map(len, pieces))
    edges = np.array([0, *accumulate(len(values[i]) for i in members)], np.int64)
    keys = np.frombuffer(b"".join([names[i] for i in members]), np.uint8)
    bytes_of = np.array([sizes[i] for i in members], np.int64)
    batch = Batch(address_of(table), 1, 1, address_of(runs), address_of(edges), len(bytes_of))
    plan = Plan(batch, address_of(keys), address_of(bytes_of), int(bytes_of.max()))
    plan.kept = table, runs, edges, keys, bytes_of, pieces
    return plan


def _as_blocks(blocks: Sequence[tuple[object, ...]]) -> Blocks:
    return blocks if isinstance(blocks, Blocks) else Blocks.of(blocks)  # type: ignore[arg-type]


def _contiguous(numbers: Numbers) -> Numbers:
    return np.ascontiguousarray(numbers, np.int64)


def prepare() -> None:
    """Load the library before a call needs it: the first time on a machine it is compiled, which is logged."""
    if is_to_be_compiled(BLOCKS):
        log.info("compiling %s, once on this machine", BLOCKS.name)
    functions()


def native_tensors(tensors: list[Tensor], group_of: list[int]) -> NativeHostTensors | None:
    """For host tensors; None without the library, or when a block has an empty part in its layer group."""
    library = functions()
    return None if library is None else NativeHostTensors(library, tensors, group_of)
