"""Layer-by-layer transfer: blocks wait in host memory, and are copied to and from the engine's cache one layer at a
time.

A block of the pool contains all layers and one checksum, so it is transferred as a whole and verified before its first
layer is copied. A load is therefore staged in host memory before its request runs: if it fails, it has failed by then,
and the request computes the tokens. A save collects layers as the step computes them, and is stored when it has all.
Names are the same as those of blocks that are moved between steps.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ems.circuit import Circuit
from ems.common.exception import EmsException, internal_error, io_error, io_timeout
from ems.config import CcKvOption, CcResult
from ems.context_caching import CcFuture
from ems.integration.parts import BlockParts
from ems.integration.plan import Stage, Transfer
from ems.integration.settings import RankLayout, Settings

_STAGING_BYTES = 256 << 20
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)  # a thread of a device copies one


class Side:
    """Copies in parallel with the engine's computation: on a thread, and for CUDA on a stream of its own."""

    def __init__(self, device: torch.device, api: Any = None) -> None:
        """api: torch.cuda, or an object with its interface; None on the host."""
        self._device = device
        self._api = torch.cuda if api is None and device.type == "cuda" else api
        self._stream: Any = self._api.Stream(device) if self._api is not None else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ems-layers")

    def begin(self, copy: Callable[[], None]) -> "Future[Any]":
        """Start a copy, in order, of what the caller's stream has computed by then."""
        if self._api is None:
            return self._thread.submit(copy)
        computed = self._api.Event()
        computed.record(self._api.current_stream(self._device))
        return self._thread.submit(self._on_stream, copy, computed)

    def _on_stream(self, copy: Callable[[], None], computed: Any) -> Any:
        with self._api.stream(self._stream):
            self._stream.wait_event(computed)
            copy()
            copied = self._api.Event()
            copied.record(self._stream)
        return copied

    def join(self, copying: "Future[Any]") -> None:
        """Later work on the caller's stream sees the copy. Raises what the copy raised."""
        copied = copying.result()
        if copied is not None:
            self._api.current_stream(self._device).wait_event(copied)

    def wait(self, copying: "Future[Any]") -> None:
        """Wait for the copy. Raises what the copy raised."""
        copied = copying.result()
        if copied is not None:
            copied.synchronize()

    def is_over(self, copying: "Future[Any]") -> bool:
        """Whether `wait` would return at once."""
        if not copying.done():
            return False
        copied = None if copying.exception() is not None else copying.result()
        return copied is None or bool(copied.query())

    def close(self) -> None:
        self._thread.shutdown(wait=True)


class Rows:
    """Free rows of the host memory. Pure."""

    def __init__(self, count: int) -> None:
        self._free = [range(count)]  # free ranges in order, never adjacent

    @property
    def num_free(self) -> int:
        return sum(map(len, self._free))

    def take(self, count: int) -> range:
        """As many contiguous rows as possible, at most `count`; empty when none is free."""
        if not count or not self._free:
            return range(0)
        index = next((i for i, free in enumerate(self._free) if len(free) >= count), None)
        if index is None:
            return self._free.pop(max(range(len(self._free)), key=lambda i: len(self._free[i])))
        free = self._free[index]
        self._free[index : index + 1] = [free[count:]] if len(free) > count else []
        return free[:count]

    def give_back(self, rows: range) -> None:
        if not rows:
            return
        merged: list[range] = []
        for free in sorted([*self._free, rows], key=lambda each: each.start):
            if merged and merged[-1].stop == free.start:
                merged[-1] = range(merged[-1].start, free.stop)
            else:
                merged.append(free)
        self._free = merged


@dataclass(slots=True)
class _Staged:
    """A load into rows, under way or done. future: None = nothing was begun."""

    rows: range
    future: CcFuture | None
    num_wanted: int
    begun_s: float
    is_reported: bool = False
    is_dropped: bool = False


@dataclass(slots=True)
class _Leaving:
    """A save whose layers are copied into rows one by one."""

    transfer: Transfer
    rows: range
    copies: "list[Future[Any]]" = field(default_factory=list)


class Layers:
    """Owned by the worker's thread. Blocks of the engine's cache must not change until their save is over."""

    def __init__(self, settings: Settings, layout: RankLayout, parts: BlockParts, circuit: Circuit) -> None:
        """parts: the rank's cache; all its layers have the same kind of attention. circuit: whether the pool is up."""
        device = parts.parts[0].device
        self._block_bytes = sum(parts.widths)
        self._counts: defaultdict[str, float] = defaultdict(int)
        num_rows = max(1, _STAGING_BYTES // self._block_bytes)
        host = [
            torch.empty((num_rows, 1, width), dtype=torch.uint8, pin_memory=device.type == "cuda")
            for width in parts.widths
        ]
        self._session = layout.open(settings, 0, [host])
        self._option = CcKvOption(timeout=settings.timeout_ms)
        self._circuit = circuit
        pairs = [_as_words(*pair) for pair in zip(host, parts.parts, strict=True)]
        self._layers = [[pairs[i] for i in numbers] for numbers in parts.layers]
        self._numbers = parts.names
        self._device = device
        self._side = Side(device)
        self._storing = ThreadPoolExecutor(2, thread_name_prefix="ems-layers-save")
        self._rows = Rows(num_rows)
        self._staged: dict[int, _Staged] = {}
        self._arriving: list[Future[Any]] = []  # copies of this step's loads, one a layer
        self._leaving: list[_Leaving] | None = None  # this step's saves; started once their first layer was computed
        self._gone: set[int] = set()  # layers whose copies were started in this step
        self._busy: list[tuple[range, Callable[[], bool]]] = []  # rows, and a check whether they are unused

    # Loads

    def stage(self, stages: Iterable[Stage]) -> None:
        """Start loading blocks into host memory: as many as there is room for, and none while the pool is down."""
        for stage in stages:
            self._collect()
            rows = self._rows.take(len(stage.hashes) if self._circuit.is_up else 0)
            staged = _Staged(rows, None, len(stage.hashes), time.monotonic())
            try:
                if rows:
                    wanted = stage.hashes[: len(rows)]
                    staged.future = self._session.caching.async_load(list(rows), wanted, [1] * len(rows), self._option)
            except EmsException as error:
                self._circuit.failed(str(error))
                self._rows.give_back(rows)
                staged.rows = range(0)
            self._staged[stage.number] = staged

    def take_staged(self) -> dict[int, int]:
        """Stages that ended since the last call, by number: how many of their blocks are in host memory."""
        over = {}
        for number, staged in list(self._staged.items()):
            if staged.is_reported or (staged.future is not None and not staged.future.done()):
                continue
            over[number] = self._count_of(staged.future) if staged.future is not None else 0
            staged.is_reported = True
            self._counts["load_seconds"] += time.monotonic() - staged.begun_s
            self._counts["failed_blocks"] += staged.num_wanted - over[number]
            if staged.is_dropped:
                self._forget(number)
        return over

    def _count_of(self, future: CcFuture) -> int:
        try:
            count = future.result().success
        except EmsException as error:
            self._circuit.failed(str(error))
            return 0
        self._circuit.succeeded()
        return count

    def drop(self, numbers: Iterable[int]) -> None:
        """Stages that are not needed any more."""
        for number in numbers:
            staged = self._staged.get(number)
            if staged is not None and not staged.is_reported:
                staged.is_dropped = True
            else:
                self._forget(number)

    def load(self, transfers: Sequence[Transfer]) -> None:
        """Start copying what was staged into the engine's blocks, layer by layer."""
        moves = []
        for transfer in transfers:
            assert transfer.stage is not None, "a load without a stage runs between steps"
            rows = self._staged.pop(transfer.stage).rows
            (blocks,) = transfer.blocks
            moves.append((rows, blocks))
            self._counts["loaded_blocks"] += len(blocks)
            self._counts["loaded_bytes"] += len(blocks) * self._block_bytes
        if moves:
            self._arriving = [self._side.begin(_Arrival(layer, moves, self._device)) for layer in self._layers]
            last = self._arriving[-1]
            self._busy += [(rows, partial(self._side.is_over, last)) for rows, _blocks in moves]

    def wait_for_layer(self, name: str) -> None:
        """Wait until the engine may read this layer of the blocks being loaded."""
        if self._arriving:
            self._side.join(self._arriving[self._numbers.get(name, -1)])

    # Saves

    def save_layer(self, name: str, transfers: Sequence[Transfer]) -> None:
        """The step has computed this layer of the blocks that it fills."""
        if self._leaving is None:
            self._begin_saves(transfers)
        if self._leaving and name in self._numbers:
            self._send(self._numbers[name])

    def end_step(
        self, transfers: Sequence[Transfer]
    ) -> tuple[list[tuple[Transfer, "Future[CcResult]"]], list[Transfer]]:
        """The step is computed. Returns the saves that are under way, and those that found no room here."""
        if self._arriving:
            self._side.join(self._arriving[-1])  # layers that the engine did not announce are in the cache as well
            self._arriving = []
        if self._leaving is None:
            self._begin_saves(transfers)
        for layer in range(len(self._layers)):
            self._send(layer)
        leaving, self._leaving = self._leaving or [], None
        self._gone = set()
        begun = []
        for each in leaving:
            future = self._storing.submit(self._store, each, time.monotonic() + self._option.timeout / 1000)
            self._busy.append((each.rows, future.done))
            begun.append((each.transfer, future))
        taken = [id(each.transfer) for each in leaving]
        return begun, [transfer for transfer in transfers if id(transfer) not in taken]

    def _begin_saves(self, transfers: Sequence[Transfer]) -> None:
        self._leaving = []
        self._collect()
        for transfer in transfers:
            rows = self._rows.take(len(transfer.hashes))
            if len(rows) == len(transfer.hashes):
                self._leaving.append(_Leaving(transfer, rows))
            else:
                self._rows.give_back(rows)

    def _send(self, layer: int) -> None:
        if layer not in self._gone:
            self._gone.add(layer)
            for each in self._leaving or ():
                (blocks,) = each.transfer.blocks
                copy = _Departure(self._layers[layer], each.rows, blocks, self._device)
                each.copies.append(self._side.begin(copy))

    def _store(self, leaving: _Leaving, deadline_s: float) -> CcResult:
        """On a thread: wait for the layers, then save the blocks, unless the saves before have found the pool down."""
        try:
            for copying in leaving.copies:
                self._side.wait(copying)
        except RuntimeError as error:
            raise internal_error(f"device memory: {error}") from error
        if not self._circuit.is_up:
            raise io_error("the pool is down")
        hashes, left_ms = leaving.transfer.hashes, int((deadline_s - time.monotonic()) * 1000)
        if left_ms <= 0:
            raise io_timeout("waited for other saves until the deadline")
        option = CcKvOption(timeout=left_ms)
        return self._session.caching.save(list(leaving.rows), hashes, [1] * len(hashes), option)

    # Both

    def take_counts(self) -> dict[str, float]:
        """Counters since the last call, by name."""
        counts, self._counts = self._counts, defaultdict(int)
        return dict(counts)

    def _collect(self) -> None:
        """Free rows that are not used any more."""
        still = []
        for rows, is_over in self._busy:
            if is_over():
                self._rows.give_back(rows)
            else:
                still.append((rows, is_over))
        self._busy = still

    def _forget(self, number: int) -> None:
        staged = self._staged.pop(number, None)
        if staged is not None:
            self._rows.give_back(staged.rows)

    def close(self) -> None:
        self._storing.shutdown(wait=True)
        self._side.close()
        self._session.close()


@dataclass(frozen=True, slots=True)
class _Arrival:
    """One layer of all loads of a step: from rows to the engine's blocks."""

    layer: "list[tuple[torch.Tensor, torch.Tensor]]"
    moves: list[tuple[range, list[int]]]
    device: torch.device

    def __call__(self) -> None:
        for rows, blocks in self.moves:
            numbers = torch.tensor(blocks).to(self.device)
            for host, cache in self.layer:
                staged = host[rows.start : rows.start + len(blocks)]
                cache.index_copy_(0, numbers, staged.to(self.device, non_blocking=True))


@dataclass(frozen=True, slots=True)
class _Departure:
    """One layer of one save: from the engine's blocks to rows."""

    layer: "list[tuple[torch.Tensor, torch.Tensor]]"
    rows: range
    blocks: list[int]
    device: torch.device

    def __call__(self) -> None:
        numbers = torch.tensor(self.blocks).to(self.device)
        for host, cache in self.layer:
            host[self.rows.start : self.rows.stop].copy_(cache.index_select(0, numbers), non_blocking=True)


def _as_words(host: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both memories as [blocks, words], with words as wide as addresses and sizes allow."""
    sizes = (cache.data_ptr(), cache.stride(0), cache.shape[2])
    word = next(dtype for dtype in _WORDS if not any(size % dtype.itemsize for size in sizes))
    return host.flatten(1).view(word), cache.flatten(1).view(word)
