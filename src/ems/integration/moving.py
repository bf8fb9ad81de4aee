"""The worker's half of a connector: moves whole blocks of one rank between the engine's cache and the pool.

All transfers run on the SDK's threads. A block of a save must not change until the save is reported (or was waited for,
before the block is reused); a block of a load is not used until the load is reported. Failures are misses.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import chain

from ems.circuit import Circuit
from ems.common.exception import EmsException
from ems.config import CcKvOption, CcResult
from ems.context_caching import CcFuture
from ems.integration.plan import Transfer
from ems.integration.settings import RankLayout, Settings

log = logging.getLogger(__name__)
_HEALTH_S = 1.0


@dataclass(frozen=True, slots=True)
class _UnderWay:
    transfer: Transfer
    future: "CcFuture | Future[CcResult]"
    begun_s: float
    is_void: bool = False  # the load's blocks are not wanted any more


@dataclass(frozen=True, slots=True)
class Reports:
    """Requests whose saves and loads are over; and those whose loads failed, where single blocks cannot be named."""

    sent: set[str]
    received: set[str]
    failed: set[str]


class Moving:
    """Owned by the worker's thread."""

    def __init__(
        self, settings: Settings, layout: RankLayout, caches: Sequence[Sequence[Sequence[object]]], is_plain: bool
    ) -> None:
        """caches: for each kind and group of layers, the rank's tensors of uint8 [num_blocks, 1, bytes].

        is_plain: the engine has one group of layers, with full attention. Otherwise a partial load is useless: with
        several groups the engine does not accept single failed blocks, and a shorter prefix needs other blocks.
        """
        self._sessions = [layout.open(settings, kind, groups) for kind, groups in enumerate(caches)]
        self._is_plain = is_plain
        self._option = CcKvOption(timeout=settings.timeout_ms)
        self.circuit = Circuit(lambda: self._sessions[0].is_healthy(_HEALTH_S))
        self.circuit.wait_for_first_look()
        self._loads: list[_UnderWay] = []
        self._saves: list[_UnderWay] = []
        self._savers: set[str] = set()  # requests with saves that are not reported yet
        self._finished: set[str] = set()  # those of them whose blocks wait for the report
        self._incoming: Counter[str] = Counter()  # loads of each request that are not over
        self._received: set[str] = set()
        self._failed_requests: set[str] = set()
        self._failed_blocks: set[int] = set()
        # with MLA all tensor-parallel ranks have the same bytes
        self._is_saving = not layout.is_mla or layout.rank_in_tp == 0
        self._block_bytes = [kind.block_bytes for kind in layout.kinds]
        self._saved: list[int] = []
        self._counts: defaultdict[str, float] = defaultdict(int)

    def forget_loads(self) -> None:
        """Loads under way end as if nothing had been found."""
        self._loads = [replace(work, is_void=True) for work in self._loads]

    def load(self, transfers: Iterable[Transfer]) -> None:
        """Start loads; `reports` reports each request."""
        begun = list(transfers)
        self._incoming.update(transfer.request_id for transfer in begun)
        for transfer in begun:
            future = self._begin(transfer, is_load=True)
            if future is None:
                self._end_load(transfer, 0)
            else:
                self._loads.append(_UnderWay(transfer, future, time.monotonic()))

    def save(self, transfers: Iterable[Transfer]) -> None:
        """Start saves of blocks whose bytes are there, or are being computed by the device."""
        for transfer in transfers:
            self._savers.add(transfer.request_id)
            if not self._is_saving:
                continue
            future = self._begin(transfer, is_load=False)
            if future is not None:
                self._saves.append(_UnderWay(transfer, future, time.monotonic()))
            else:
                self._counts["unsaved_blocks"] += len(transfer.hashes)

    def adopt(self, transfer: Transfer, future: "Future[CcResult]") -> None:
        """Take over a save that was started elsewhere, so that it is reported like others."""
        self._savers.add(transfer.request_id)
        self._saves.append(_UnderWay(transfer, future, time.monotonic()))

    def wait_for(self, preempted: Iterable[str], overtaken: Iterable[str]) -> None:
        """Finish the saves of these requests; afterwards their blocks may be overwritten.

        Saves of preempted requests are not reported any more.
        """
        waited = {*preempted, *overtaken}
        for work in self._saves:
            if work.transfer.request_id in waited:
                self._end_save(work)
        self._saves = [work for work in self._saves if work.transfer.request_id not in waited]
        self._savers -= set(preempted)

    def reports(self, finished: Iterable[str]) -> Reports:
        """What ended since the last call. finished: requests that ended since then."""
        self._finished |= set(finished) & self._savers
        self._collect()
        busy = {work.transfer.request_id for work in self._saves}
        sent, received = self._finished - busy, self._received
        self._finished &= busy
        self._savers -= sent
        failed = self._failed_requests & received
        self._failed_requests -= failed
        self._received = set()
        return Reports(sent, received, failed)

    def take_failed_blocks(self) -> set[int]:
        """Blocks that ended loads did not fill."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_saved(self) -> list[int]:
        """Hashes of blocks, of the first kind, that the pool has stored since the last call."""
        saved, self._saved = self._saved, []
        return saved

    def take_counts(self) -> dict[str, float]:
        """Counters since the last call, by name."""
        counts, self._counts = self._counts, defaultdict(int)
        return dict(counts)

    def close(self) -> None:
        self.circuit.close()
        for session in self._sessions:
            session.close()

    def _begin(self, transfer: Transfer, is_load: bool) -> CcFuture | None:
        """None: the pool is down, nothing was begun."""
        if not self.circuit.is_up:
            return None
        caching, blocks = self._sessions[transfer.kind].caching, transfer.blocks
        try:
            move = caching.async_load if is_load else caching.async_save
            if len(blocks) == 1:
                return move(blocks[0], transfer.hashes, [1] * len(transfer.hashes), self._option)
            chunks = [[(block, 1) for block in group] for group in blocks]
            return move(hashes=transfer.hashes, chunk_descs=chunks, option=self._option)
        except EmsException as error:
            self.circuit.failed(str(error))
            return None

    def _collect(self) -> None:
        for work in [work for work in self._loads if work.future.done()]:
            self._loads.remove(work)
            count = self._result(work)
            if count is not None:
                self.circuit.succeeded()
            self._count("load", work, 0 if work.is_void else count or 0)
            self._end_load(work.transfer, 0 if work.is_void else count or 0)
        for work in [work for work in self._saves if work.future.done()]:
            self._saves.remove(work)
            self._end_save(work)

    def _result(self, work: _UnderWay) -> int | None:
        """Blocks of the prefix that were moved; None when the pool failed, which opens the circuit breaker."""
        try:
            return work.future.result().success
        except EmsException as error:
            self.circuit.failed(str(error))
            return None

    def _end_save(self, work: _UnderWay) -> None:
        """Waits for it."""
        count = self._result(work) or 0
        if work.transfer.kind == 0:
            self._saved += work.transfer.hashes[:count]
        self._counts["unsaved_blocks"] += len(work.transfer.hashes) - count
        self._count("save", work, count)

    def _count(self, kind: str, work: _UnderWay, count: int) -> None:
        done = {"save": "saved", "load": "loaded"}[kind]
        self._counts[f"{done}_blocks"] += count
        self._counts[f"{done}_bytes"] += count * self._block_bytes[work.transfer.kind]
        self._counts[f"{kind}_seconds"] += time.monotonic() - work.begun_s

    def _end_load(self, transfer: Transfer, count: int) -> None:
        missing = len(transfer.hashes) - count
        self._counts["failed_blocks"] += missing
        if missing and not self._is_plain:
            self._failed_requests.add(transfer.request_id)
        elif missing:
            self._failed_blocks.update(chain.from_iterable(group[count:] for group in transfer.blocks))
        self._incoming[transfer.request_id] -= 1
        if not self._incoming[transfer.request_id]:
            del self._incoming[transfer.request_id]
            self._received.add(transfer.request_id)
