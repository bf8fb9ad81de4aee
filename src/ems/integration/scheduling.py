"""The scheduler's half of a connector: which blocks of which request are loaded and saved, and when. Moves no bytes.

A request asks the pool once, on a thread, for the full blocks of its prompt that the engine lacks: the scheduler waits
briefly, and otherwise asks again in its next step. A failed load is not tried again. Blocks are saved in the step that
fills them, once the scheduler knows their tokens; what the pool lacks of a prefix in the engine's own cache is saved
when a request uses it (own.py). The engine takes blocks of a sliding window back while a request runs: a request that
gets such a block waits for the save that still reads it.
"""

import hashlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from ems.integration.adapters import Adapters
from ems.integration.lookup import Lookup
from ems.integration.own import STEP_TOKENS, Own, OwnPrefixes
from ems.integration.plan import Duties, Plan, Stage, Transfer
from ems.integration.prefix import Chain, ExtraKeys, Kind, unit_of
from ems.integration.stored import Stored, StoredBlock

log = logging.getLogger(__name__)
_PATIENCE_S = 0.002  # seconds that a scheduler step waits for a lookup
PROMISED = "ems_num_tokens"
"""In kv_transfer_params: so many tokens of the prompt are in the pool, or on their way there."""


@dataclass(slots=True)
class _Tracked:
    request: Any
    chains: dict[int, Chain]  # by block size
    num_saved: list[int]  # for each kind, how many blocks from the first on the pool has, or is getting
    blocks: list[list[int]] = field(default_factory=list)  # for each group of layers
    asked: tuple[int, int] | None = None  # tokens that the engine has, and could have; `lookup` is about these
    lookup: "Future[int] | None" = None
    stage: int | None = None  # of a layer-by-layer load; and how many blocks each rank has staged
    staged: list[int] = field(default_factory=list)
    loading: frozenset[int] = frozenset()
    is_let_down: bool = False  # a load has failed
    waits_until_s: float | None = None  # until when it waits for promised tokens
    own: Own = field(default_factory=Own)

    @property
    def is_promised(self) -> bool:
        """Whether another engine will wait for the request's blocks."""
        return bool((getattr(self.request, "kv_transfer_params", None) or {}).get("do_remote_decode"))

    def hashes(self, kind: Kind, num_blocks: int) -> list[int]:
        """Hashes of the first blocks of a kind, which the request's tokens must fill."""
        return self.chains[kind.block_size].upto(self.request, num_blocks)


class Scheduling:
    """Owned by the scheduler's thread."""

    def __init__(self, kinds: Sequence[Kind], extra_keys: ExtraKeys, duties: Duties) -> None:
        self._kinds = kinds
        self._unit = unit_of(kinds)
        self._num_groups = sum(len(kind.groups) for kind in kinds)
        self._extra_keys = extra_keys
        self._duties = duties
        self._tracked: dict[str, _Tracked] = {}
        self._saving: set[str] = set()  # requests with a save that the workers know of
        self._readers: dict[int, str] = {}  # block of a window -> the request that may still be saving it
        self._own = OwnPrefixes(kinds)
        self._overtaken: set[str] = set()
        self._loads: list[Transfer] = []
        self._root = b""
        self._is_reset = False
        self._stages: list[Stage] = []
        self._dropped: list[int] = []
        self._by_stage: dict[int, _Tracked] = {}
        self._next_stage = 0
        self._adapters = Adapters()
        self._stored = Stored()
        self._counts: Counter[str] = Counter()
        self.lookup: Lookup | None = None  # set once the workers have reported their layouts

    def reset(self) -> None:
        """The weights have changed: names are different from now on, and nothing with an old name is loaded or saved.

        Only this engine knows the new names, because it is unknown which other engines have the same weights.
        """
        self._root = secrets.token_bytes(32)
        for tracked in self._tracked.values():
            self._drop(tracked)
        self._tracked = {}
        self._loads = [replace(load, hashes=[secrets.randbits(256) for _ in load.hashes]) for load in self._loads]
        self._is_reset = True

    def matched(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens after `num_computed_tokens` that the pool has, in whole blocks (None = ask again), and whether to load
        them.
        """
        unit, start = self._unit, num_computed_tokens
        end = (request.num_tokens - 1) // unit * unit  # the last token is always computed
        may_load = self._duties.is_loading and end > start and start % unit == 0
        may_load = may_load and not getattr(request, "skip_reading_prefix_cache", 0)
        if self.lookup is None:
            return 0, False
        if may_load and self._is_adapter_read(request):
            return None, False
        root = self._root_of(request)
        if root is None:
            return 0, False
        tracked = self._track(request, root)
        may_load = may_load and not tracked.is_let_down
        if may_load and tracked.asked != (start, end):
            self._drop(tracked)
            hashes = [tracked.hashes(kind, end // kind.block_size) for kind in self._kinds]
            tracked.asked, tracked.lookup = (start, end), self.lookup.begin(hashes, start, end)
        if self._duties.is_saving:
            self._own.look(tracked.own, start, tracked.hashes, self.lookup, tracked.is_promised)
        if tracked.is_promised and not self._own.is_known(tracked.own, _PATIENCE_S):
            return None, False
        if not may_load or tracked.lookup is None:
            return 0, False
        try:
            reached = tracked.lookup.result(_PATIENCE_S)
        except FutureTimeout:
            return None, False
        if self._is_awaited(tracked, reached):
            tracked.asked = None
            return None, False
        if self._duties.is_layerwise and reached > start:
            count = self._staged(tracked, range(start // unit, reached // unit))
            if count is None:
                return None, False
            reached = start + count * unit
        found = reached - start
        self._counts.update(lookups=1, lookup_blocks=(end - start) // unit, hit_blocks=found // unit)
        return found, found > 0 and not self._duties.is_layerwise

    def _staged(self, tracked: _Tracked, wanted: range) -> int | None:
        """How many of these blocks all ranks have in host memory; None while they are not ready."""
        if tracked.stage is None:
            tracked.stage, self._next_stage = self._next_stage, self._next_stage + 1
            self._by_stage[tracked.stage] = tracked
            hashes = tracked.hashes(self._kinds[0], wanted.stop)[wanted.start :]
            self._stages.append(Stage(tracked.stage, hashes))
        assert self.lookup is not None
        return min(tracked.staged) if len(tracked.staged) == self.lookup.num_ranks else None

    def staged(self, reports: Mapping[int, Sequence[int]]) -> None:
        """reports: for each stage, how many blocks further ranks have."""
        for number, counts in reports.items():
            if number in self._by_stage:
                self._by_stage[number].staged += counts

    def _drop(self, tracked: _Tracked) -> None:
        """What was staged for the request will not be loaded."""
        if tracked.stage is not None:
            del self._by_stage[tracked.stage]
            self._dropped.append(tracked.stage)
            tracked.stage, tracked.staged = None, []

    def _is_awaited(self, tracked: _Tracked, num_tokens: int) -> bool:
        """Whether more than `num_tokens` tokens were promised by an engine that may still be saving them."""
        promised = (getattr(tracked.request, "kv_transfer_params", None) or {}).get(PROMISED, 0)
        unit = self._unit
        if not isinstance(promised, int) or num_tokens >= min(promised, tracked.request.num_tokens - 1) // unit * unit:
            return False
        now_s = time.monotonic()
        if tracked.waits_until_s is None:
            tracked.waits_until_s = now_s + self._duties.handover_s
        return now_s < tracked.waits_until_s

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        """The request has its blocks; the tokens that `matched` promised will be loaded into them."""
        self._overtake(blocks)
        root = self._root_of(request)
        if root is None:
            return
        tracked = self._track(request, root)
        tracked.blocks = [list(some) for some in blocks]
        if num_external_tokens and tracked.asked is not None:
            start = tracked.asked[0]
            loads = self._transfers(
                tracked, [kind.range_of(start, start + num_external_tokens) for kind in self._kinds]
            )
            if tracked.stage is not None:
                loads = [replace(load, stage=tracked.stage) for load in loads]
                del self._by_stage[tracked.stage]
                tracked.stage, tracked.staged = None, []
            self._loads += loads
            tracked.loading = frozenset(chain.from_iterable(chain.from_iterable(load.blocks for load in loads)))
        self._drop(tracked)
        tracked.asked = tracked.lookup = None

    def plan(self, output: Any) -> Plan:
        """The step's transfers, from vLLM's SchedulerOutput."""
        plan = Plan(loads=self._loads, preempted=list(output.preempted_req_ids or ()), is_reset=self._is_reset)
        plan.stages, plan.dropped = self._stages, self._dropped
        self._loads, self._is_reset, self._stages, self._dropped = [], False, [], []
        self._saving -= set(plan.preempted)  # the workers finish these saves first
        for id in plan.preempted:
            if id in self._tracked:
                self._tracked[id].own = Own()
        num_computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            num_computed[new.req_id] = new.num_computed_tokens
            self._restart(new.req_id, new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for id, new_blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            num_computed[id] = computed
            if id in cached.resumed_req_ids:
                self._restart(id, new_blocks or [[]] * self._num_groups, computed)
            elif new_blocks:
                self._overtake(new_blocks)
                for mine, more in zip(
                    self._tracked[id].blocks if id in self._tracked else (), new_blocks, strict=False
                ):
                    mine += more
        plan.overtaken, self._overtaken = sorted(self._overtaken), set()
        if self._duties.is_saving:
            num_left = max(STEP_TOKENS, self._unit)
            for id, count in output.num_scheduled_tokens.items():
                self._save(plan, id, num_computed.get(id, 0), count)
                num_left -= self._save_own(plan, id, num_computed.get(id, 0), num_left)
        return plan

    def _restart(self, request_id: str, blocks: Sequence[Sequence[int]], num_computed_tokens: int) -> None:
        """A request begins to compute: what it has was loaded, or is the engine's own."""
        self._overtake(blocks)
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.blocks = [list(some) for some in blocks]
            tracked.num_saved = [num_computed_tokens // kind.block_size for kind in self._kinds]

    def _overtake(self, blocks: Iterable[Sequence[int]]) -> None:
        """These blocks are given to another request."""
        if self._readers:
            given = self._readers.keys() & chain.from_iterable(blocks)
            self._overtaken |= {self._readers.pop(block) for block in given}

    def _save(self, plan: Plan, request_id: str, num_computed: int, num_tokens: int) -> None:
        """num_computed: tokens before this step. Blocks that leave a window may belong to another request by then."""
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        num_known = min(num_computed + num_tokens, tracked.request.num_tokens)  # not drafts, nor tokens under way
        ranges = []
        for kind, num_saved in zip(self._kinds, tracked.num_saved, strict=True):
            num_blocks = min(len(tracked.blocks[group]) for group in kind.groups) if tracked.blocks else 0
            first, end = max(num_saved, kind.first_needed(num_computed)), min(num_known // kind.block_size, num_blocks)
            ranges.append(range(first, end))
        for wanted, save in self._begin_saves(plan, tracked, ranges):
            tracked.num_saved[save.kind] = wanted.stop

    def _save_own(self, plan: Plan, request_id: str, num_computed: int, num_tokens: int) -> int:
        """Save what the pool lacks of the prefix that the request found in the engine's cache, at most `num_tokens`
        tokens if no other engine waits for them. Returns how many.
        """
        tracked = self._tracked.get(request_id)
        if tracked is None or not tracked.blocks:
            return 0
        limit = None if tracked.is_promised else max(0, num_tokens)
        ranges = self._own.take_lacking(tracked.own, num_computed, limit, tracked.is_promised)
        self._begin_saves(plan, tracked, ranges)
        return max(len(some) * kind.block_size for kind, some in zip(self._kinds, ranges, strict=True))

    def _begin_saves(self, plan: Plan, tracked: _Tracked, ranges: Sequence[range]) -> list[tuple[range, Transfer]]:
        """Put saves of these ranges of blocks into the plan. Returns each with its range."""
        saves = [(ranges[save.kind], save) for save in self._transfers(tracked, ranges)]
        for wanted, save in saves:
            if self._kinds[save.kind].window is not None:
                self._readers.update(dict.fromkeys(chain.from_iterable(save.blocks), save.request_id))
            if save.kind == 0 and self._duties.has_events:
                self._expect(tracked.request, wanted.start, save.hashes)
            if self.lookup is not None and self.lookup.is_up:
                self._own.saving(save.kind, save.hashes)
            self._saving.add(save.request_id)
        plan.saves += [save for _wanted, save in saves]
        return saves

    def _transfers(self, tracked: _Tracked, ranges: Sequence[range]) -> list[Transfer]:
        """Transfers of these ranges of blocks, for each kind."""
        transfers = []
        for number, (kind, wanted) in enumerate(zip(self._kinds, ranges, strict=True)):
            if wanted:
                hashes = tracked.hashes(kind, wanted.stop)[wanted.start :]
                blocks = [tracked.blocks[group][wanted.start : wanted.stop] for group in kind.groups]
                transfers.append(Transfer(tracked.request.request_id, number, blocks, hashes))
        return transfers

    def loaded(self, request_ids: Iterable[str], failed_blocks: Iterable[int], failed: Iterable[str]) -> None:
        """The workers report ended loads, and what is missing: blocks or, in models of several groups, requests."""
        missing, let_down = frozenset(failed_blocks), frozenset(failed)
        for id in request_ids:
            tracked = self._tracked.get(id)
            if tracked is not None:
                has_failed = id in let_down or bool(tracked.loading & missing)
                tracked.is_let_down = tracked.is_let_down or has_failed
                tracked.loading = frozenset()

    def finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """The request is over. True: its blocks are free only when the workers have reported its saves.

        Also returns, for a handover, how many tokens the pool has, or is getting.
        """
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None:
            self._drop(tracked)
        is_saving = request.request_id in self._saving
        self._saving.discard(request.request_id)
        if tracked is None or not tracked.is_promised:
            return is_saving, None
        saved = zip(self._kinds, tracked.num_saved, strict=True)
        return is_saving, {PROMISED: min(kind.block_size * count for kind, count in saved) // self._unit * self._unit}

    # What was saved, and what was counted

    def _expect(self, request: Any, first: int, names: list[int]) -> None:
        size, hashes = self._kinds[0].block_size, request.block_hashes
        if len(hashes) < first + len(names):
            return  # vLLM hashes nothing when its own prefix cache is off
        adapter = getattr(request.lora_request, "lora_name", None)
        for i, name in enumerate(names, first):
            tokens = tuple(request.all_token_ids[i * size : (i + 1) * size])
            self._stored.expect(name, StoredBlock(hashes[i], hashes[i - 1] if i else None, tokens, adapter))

    def saved(self, counts: Mapping[int, int]) -> None:
        """counts: for each hash, how many further ranks have saved its block."""
        if self.lookup is not None:
            self._stored.report(counts, self.lookup.num_ranks)

    def take_stored(self) -> list[StoredBlock]:
        """Blocks that all ranks have saved since the last call."""
        return self._stored.take()

    def take_counts(self) -> dict[str, float]:
        """Counters since the last call, by name."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    def close(self) -> None:
        self._adapters.close()
        if self.lookup is not None:
            self.lookup.close()

    def _track(self, request: Any, root: bytes) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            chains = {size: Chain(size, self._extra_keys, root) for size in {kind.block_size for kind in self._kinds}}
            tracked = _Tracked(request, chains, [0] * len(self._kinds))
            self._tracked[request.request_id] = tracked
        return tracked

    def _root_of(self, request: Any) -> bytes | None:
        """The root of the request's names: weights and adapter; None while or when these are unknown."""
        adapter = getattr(request, "lora_request", None)
        if adapter is None:
            return self._root
        future = self._adapters.look(adapter)
        if future is None or not future.done() or future.exception() is not None:
            return None
        return hashlib.sha256(b"lora" + self._root + future.result().encode()).digest()

    def _is_adapter_read(self, request: Any) -> bool:
        """Whether the request's adapter is being read, so that `_root_of` will know soon."""
        adapter = getattr(request, "lora_request", None)
        future = self._adapters.look(adapter) if adapter is not None else None
        return future is not None and not future.done()
