"""NativeHostTensors: a batch between host tensors and the pool's memory in one call, without Python's lock."""

import ctypes
import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ems.native.build import BLOCKS
from ems.native.library import Xxh3, is_to_be_compiled, load, sums_alike, xxh3
from ems.runs import Blocks, Bytes, Numbers, address_of, addresses_of
from ems.tensors import Tensor

log = logging.getLogger("ems")
_SUM_BYTES = 16


class _Batch(ctypes.Structure):
    """As blocks.cpp has it."""

    _fields_ = [
        ("tensors", ctypes.c_void_p),
        ("num_tensors", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("runs", ctypes.c_void_p),
        ("edges", ctypes.c_void_p),
        ("num_blocks", ctypes.c_int64),
    ]


def _prepare(library: ctypes.CDLL) -> None:
    """Declares the functions. Raises OSError when the library sums otherwise than Python does."""
    batch, functions, address = ctypes.POINTER(_Batch), ctypes.POINTER(Xxh3), ctypes.c_void_p
    library.ems_sum.argtypes = [functions, ctypes.c_char_p, ctypes.c_uint64, address]
    library.ems_gather.argtypes = [batch, address, functions, address]
    library.ems_scatter.argtypes = [batch, address, address, functions, address]
    library.ems_sum.restype = library.ems_gather.restype = None
    library.ems_scatter.restype = ctypes.c_int64

    def sum_of(data: bytes) -> bytes:
        out = ctypes.create_string_buffer(_SUM_BYTES)
        library.ems_sum(xxh3(), data, len(data), out)
        return out.raw

    if not sums_alike(sum_of):
        raise OSError("its sums are not those of xxhash")


class NativeHostTensors:
    """As `HostTensors`, in C++."""

    batch_bytes = 8 << 20  # between two looks at the clock

    def __init__(self, library: ctypes.CDLL, tensors: list[Tensor], group_of: list[int]) -> None:
        self._library = library
        self._xxh3 = xxh3()
        self._memories = [tensor.flat() for tensor in tensors]  # keeps them alive
        rows = [
            (address_of(memory), tensor.strides[0], tensor.token_bytes, group)
            for memory, tensor, group in zip(self._memories, tensors, group_of, strict=True)
        ]
        self._table: Numbers = np.array(rows, np.int64)

    def gather(self, blocks: Sequence[tuple[object, ...]], targets: Sequence[Bytes]) -> None:
        self._gather(_as_blocks(blocks), targets, None)

    def gather_summed(self, blocks: Sequence[tuple[object, ...]], targets: Sequence[Bytes]) -> bytes:
        sums = np.empty((len(targets), _SUM_BYTES), np.uint8)
        self._gather(_as_blocks(blocks), targets, sums)
        return sums.tobytes()

    def _gather(self, blocks: Blocks, targets: Sequence[Bytes], sums: npt.NDArray[np.uint8] | None) -> None:
        runs, edges, addresses = _contiguous(blocks.runs), _contiguous(blocks.edges), addresses_of(targets)
        out = None if sums is None else address_of(sums)
        self._library.ems_gather(self._batch(blocks, runs, edges), address_of(addresses), self._xxh3, out)

    def scatter(self, blocks: Sequence[tuple[object, ...]], sources: Sequence[Bytes]) -> None:
        done = self._scatter(_as_blocks(blocks), sources, None)
        assert done == len(blocks), "a source is not as long as its block"

    def scatter_checked(self, blocks: Sequence[tuple[object, ...]], sources: Sequence[Bytes], sums: bytes) -> int:
        return self._scatter(_as_blocks(blocks), sources, sums)

    def _scatter(self, blocks: Blocks, sources: Sequence[Bytes], sums: bytes | None) -> int:
        assert len(blocks) == len(sources)
        assert sums is None or len(sums) == _SUM_BYTES * len(sources)
        runs, edges, addresses = _contiguous(blocks.runs), _contiguous(blocks.edges), addresses_of(sources)
        lengths = np.array(getattr(sources, "lengths", None) or list(map(len, sources)), np.int64)
        batch = self._batch(blocks, runs, edges)
        done: int = self._library.ems_scatter(batch, address_of(addresses), address_of(lengths), self._xxh3, sums)
        return done

    def _batch(self, blocks: Blocks, runs: Numbers, edges: Numbers) -> _Batch:
        table = self._table
        return _Batch(
            address_of(table), len(table), blocks.num_groups, address_of(runs), address_of(edges), len(blocks)
        )


def _as_blocks(blocks: Sequence[tuple[object, ...]]) -> Blocks:
    return blocks if isinstance(blocks, Blocks) else Blocks.of(blocks)  # type: ignore[arg-type]


def _contiguous(numbers: Numbers) -> Numbers:
    return np.ascontiguousarray(numbers, np.int64)


def prepare() -> None:
    """Has the library before anybody waits for it: the first time on a machine it is compiled, which a line says."""
    if is_to_be_compiled(BLOCKS):
        log.info("compiling %s, once on this machine", BLOCKS.name)
    load(BLOCKS, _prepare)


def native_tensors(tensors: list[Tensor], group_of: list[int]) -> NativeHostTensors | None:
    """Those of host tensors; None where the library cannot be had, or a block has an empty part of its layer group."""
    library = load(BLOCKS, _prepare)
    return None if library is None else NativeHostTensors(library, tensors, group_of)
