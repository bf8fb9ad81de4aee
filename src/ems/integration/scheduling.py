"""The scheduler's half of a connector: which blocks of which request are loaded and saved, and when. Moves no bytes.

A request asks the pool once for the full blocks of its prompt behind those the engine has, on a thread: the scheduler
waits for a moment and otherwise asks again in its next step. A load that came short is not tried again. Blocks are
saved in the step that fills them, once the scheduler knows their tokens.
"""

import hashlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from typing import Any

from ems.circuit import Circuit
from ems.config import CcKvOption
from ems.integration.adapters import Adapters
from ems.integration.chain import Chain, ExtraKeys
from ems.integration.settings import RankLayout, Settings
from ems.integration.stored import Stored, StoredBlock
from ems.session import Session

log = logging.getLogger(__name__)
_PATIENCE_S = 0.002  # of a scheduler step for a lookup
_HEALTH_S = 1.0
_LOOKUP_THREADS = 4
PROMISED = "ems_num_tokens"
"""In kv_transfer_params: so many tokens of the prompt are in the pool, or on their way there."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Blocks of the engine's cache and the hashes of what belongs into them, in chain order."""

    request_id: str
    blocks: list[int]
    hashes: list[int]


@dataclass(slots=True)
class Plan:
    """What the workers do in one step. preempted: requests whose blocks are about to be overwritten.

    is_reset: loads that are under way bring what is not wanted any more.
    """

    loads: list[Transfer] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    is_reset: bool = False


@dataclass(frozen=True, slots=True)
class Duties:
    """What a connector does. handover_s: how long a request waits for tokens that another engine has promised."""

    is_loading: bool = True
    is_saving: bool = True
    has_events: bool = False
    handover_s: float = 0.0


class Lookup:
    """Asks the pool how many blocks of a prefix all ranks have."""

    def __init__(self, settings: Settings, layouts: Iterable[RankLayout]) -> None:
        self._timeout_s = settings.timeout_ms / 1000
        self._sessions: list[Session] = []
        for layout in layouts:
            session = settings.open(layout.identity())
            session.caching.register_kvcache(layout.empty_cache())
            self._sessions.append(session)
        self._executor = ThreadPoolExecutor(_LOOKUP_THREADS, thread_name_prefix="ems-lookup")
        self._circuit = Circuit(lambda: self._sessions[0].is_healthy(_HEALTH_S))

    @property
    def num_ranks(self) -> int:
        """Ranks that have a part of each block."""
        return len(self._sessions)

    def begin(self, hashes: list[int]) -> "Future[int] | None":
        """None while the pool is down."""
        return self._executor.submit(self._count, hashes) if self._circuit.is_up else None

    def _count(self, hashes: list[int]) -> int:
        deadline_s, count = time.monotonic() + self._timeout_s, len(hashes)
        for session in self._sessions:
            left_ms = int((deadline_s - time.monotonic()) * 1000)
            count = session.caching.exists(hashes[:count], CcKvOption(timeout=max(1, left_ms))) if count else 0
        if time.monotonic() >= deadline_s:
            self._circuit.failed("a lookup took longer than its deadline")
        else:
            self._circuit.succeeded()
        return count

    def close(self) -> None:
        self._circuit.close()
        self._executor.shutdown(wait=True, cancel_futures=True)
        for session in self._sessions:
            session.close()


@dataclass(slots=True)
class _Tracked:
    request: Any
    chain: Chain
    blocks: list[int] = field(default_factory=list)
    num_saved: int = 0  # blocks from the first on that the pool has, or is being given
    asked: tuple[int, int] | None = None  # first block and number of blocks that `lookup` is about
    lookup: "Future[int] | None" = None
    loading: frozenset[int] = frozenset()
    is_let_down: bool = False  # a load came short
    waits_until_s: float | None = None  # for tokens that were promised


class Scheduling:
    """Owned by the scheduler's thread."""

    def __init__(self, block_size: int, extra_keys: ExtraKeys, duties: Duties) -> None:
        self._block_size = block_size
        self._extra_keys = extra_keys
        self._duties = duties
        self._tracked: dict[str, _Tracked] = {}
        self._saving: set[str] = set()  # requests with a save that the workers were told of
        self._loads: list[Transfer] = []
        self._root = b""
        self._is_reset = False
        self._adapters = Adapters()
        self._stored = Stored()
        self._counts: Counter[str] = Counter()
        self.lookup: Lookup | None = None  # set when the workers have told their layouts

    def reset(self) -> None:
        """The weights changed: names are others from here on, and what has an old one is neither loaded nor saved.

        Only this engine knows the new names: nobody can tell whose weights are the same.
        """
        self._root = secrets.token_bytes(32)
        self._tracked = {}
        self._loads = [replace(load, hashes=[secrets.randbits(256) for _ in load.hashes]) for load in self._loads]
        self._is_reset = True

    def matched(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens behind `num_computed_tokens` that the pool has, in whole blocks; None = ask again. And if to load."""
        size = self._block_size
        first = num_computed_tokens // size
        count = (request.num_tokens - 1) // size - first  # the last token is always computed
        may_load = self._duties.is_loading and self.lookup is not None
        if not may_load or count < 1 or num_computed_tokens % size or getattr(request, "skip_reading_prefix_cache", 0):
            return 0, False
        if self._is_adapter_read(request):
            return None, False
        root = self._root_of(request)
        if root is None:
            return 0, False
        tracked = self._track(request, root)
        if tracked.is_let_down:
            return 0, False
        if tracked.asked != (first, count):
            hashes = tracked.chain.upto(request, first + count)[first:]
            assert self.lookup is not None
            tracked.asked, tracked.lookup = (first, count), self.lookup.begin(hashes)
        if tracked.lookup is None:
            return 0, False
        try:
            found = tracked.lookup.result(_PATIENCE_S) * size
        except FutureTimeout:
            return None, False
        if self._is_awaited(tracked, first * size + found):
            tracked.asked = None
            return None, False
        self._counts.update(lookups=1, lookup_blocks=count, hit_blocks=found // size)
        return found, found > 0

    def _is_awaited(self, tracked: _Tracked, num_tokens: int) -> bool:
        """Whether more than `num_tokens` were promised, by an engine that may still be saving them."""
        promised = (getattr(tracked.request, "kv_transfer_params", None) or {}).get(PROMISED, 0)
        size = self._block_size
        if not isinstance(promised, int) or num_tokens >= min(promised, tracked.request.num_tokens - 1) // size * size:
            return False
        now_s = time.monotonic()
        if tracked.waits_until_s is None:
            tracked.waits_until_s = now_s + self._duties.handover_s
        return now_s < tracked.waits_until_s

    def allocated(self, request: Any, blocks: Sequence[int], num_external_tokens: int) -> None:
        """The request has its blocks; the tokens that `matched` promised are to be loaded into them."""
        root = self._root_of(request)
        if root is None:
            return
        tracked = self._track(request, root)
        tracked.blocks = list(blocks)
        if num_external_tokens and tracked.asked is not None:
            first, count = tracked.asked[0], num_external_tokens // self._block_size
            hashes = tracked.chain.upto(request, first + count)[first:]
            self._loads.append(Transfer(request.request_id, tracked.blocks[first : first + count], hashes))
            tracked.loading = frozenset(tracked.blocks[first : first + count])
        tracked.asked = tracked.lookup = None

    def plan(self, output: Any) -> Plan:
        """The step's transfers, from vLLM's SchedulerOutput."""
        plan = Plan(loads=self._loads, preempted=list(output.preempted_req_ids or ()), is_reset=self._is_reset)
        self._loads, self._is_reset = [], False
        self._saving -= set(plan.preempted)  # the workers end these saves first
        num_computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            num_computed[new.req_id] = new.num_computed_tokens
            self._restart(new.req_id, list(new.block_ids[0]), new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for id, new_blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            num_computed[id] = computed
            if id in cached.resumed_req_ids:
                self._restart(id, list(new_blocks[0]) if new_blocks else [], computed)
            elif new_blocks and id in self._tracked:
                self._tracked[id].blocks += new_blocks[0]
        if self._duties.is_saving:
            for id, count in output.num_scheduled_tokens.items():
                self._save(plan, id, num_computed.get(id, 0) + count)
        return plan

    def _restart(self, request_id: str, blocks: list[int], num_computed_tokens: int) -> None:
        """A request begins to compute: what it has then was loaded, or was saved when somebody computed it."""
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.blocks, tracked.num_saved = blocks, num_computed_tokens // self._block_size

    def _save(self, plan: Plan, request_id: str, num_computed_tokens: int) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        num_known = min(num_computed_tokens, tracked.request.num_tokens)  # guesses and tokens on their way come later
        first, end = tracked.num_saved, min(num_known // self._block_size, len(tracked.blocks))
        if end > first:
            hashes = tracked.chain.upto(tracked.request, end)[first:]
            plan.saves.append(Transfer(request_id, tracked.blocks[first:end], hashes))
            if self._duties.has_events:
                self._expect(tracked.request, first, hashes)
            tracked.num_saved = end
            self._saving.add(request_id)

    def loaded(self, request_ids: Iterable[str], failed_blocks: Iterable[int]) -> None:
        """The workers report ended loads, and all blocks that did not come."""
        failed = frozenset(failed_blocks)
        for id in request_ids:
            tracked = self._tracked.get(id)
            if tracked is not None:
                tracked.is_let_down = tracked.is_let_down or bool(tracked.loading & failed)
                tracked.loading = frozenset()

    def finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """The request is over. True: its blocks are free only when the workers have reported its saves.

        And what is told to who asked for a handover: how many tokens the pool has, or is being given.
        """
        tracked = self._tracked.pop(request.request_id, None)
        is_saving = request.request_id in self._saving
        self._saving.discard(request.request_id)
        wants_handover = (getattr(request, "kv_transfer_params", None) or {}).get("do_remote_decode")
        if not wants_handover or tracked is None:
            return is_saving, None
        return is_saving, {PROMISED: tracked.num_saved * self._block_size}

    # What was saved, and what was counted

    def _expect(self, request: Any, first: int, names: list[int]) -> None:
        size, hashes = self._block_size, request.block_hashes
        if len(hashes) < first + len(names):
            return  # vLLM hashes nothing where its own prefix cache is off
        adapter = getattr(request.lora_request, "lora_name", None)
        for i, name in enumerate(names, first):
            tokens = tuple(request.all_token_ids[i * size : (i + 1) * size])
            self._stored.expect(name, StoredBlock(hashes[i], hashes[i - 1] if i else None, tokens, adapter))

    def saved(self, counts: Mapping[int, int]) -> None:
        """counts: of each hash, how many more ranks have saved its block."""
        if self.lookup is not None:
            self._stored.report(counts, self.lookup.num_ranks)

    def take_stored(self) -> list[StoredBlock]:
        """Blocks that all ranks have saved since the last call."""
        return self._stored.take()

    def take_counts(self) -> dict[str, float]:
        """What was counted since the last call, by name."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    def close(self) -> None:
        self._adapters.close()
        if self.lookup is not None:
            self.lookup.close()

    def _track(self, request: Any, root: bytes) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = _Tracked(request, Chain(self._block_size, self._extra_keys, root))
            self._tracked[request.request_id] = tracked
        return tracked

    def _root_of(self, request: Any) -> bytes | None:
        """What all names of the request hang on: weights, and its adapter's; None when these are not known (yet)."""
        adapter = getattr(request, "lora_request", None)
        if adapter is None:
            return self._root
        future = self._adapters.look(adapter)
        if future is None or not future.done() or future.exception() is not None:
            return None
        return hashlib.sha256(b"lora" + self._root + future.result().encode()).digest()

    def _is_adapter_read(self, request: Any) -> bool:
        """Whether the request's adapter is being read just now: `_root_of` will know soon."""
        adapter = getattr(request, "lora_request", None)
        future = self._adapters.look(adapter) if adapter is not None else None
        return future is not None and not future.done()
