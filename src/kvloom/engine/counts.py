"""Counts: what an engine has done since it was made. Owned by its thread; Stats is the copy for others."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from kvloom.engine.histogram import Histogram
from kvloom.engine.schedule.blocks import BlockPool
from kvloom.engine.schedule.seq import Seq, Status
from kvloom.engine.stats import BatchTimes, Stats

STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_NOT_COUNTED = ("total_compute_s", "total_restarts", "total_tier_")
_COUNTED = [f.name for f in fields(Stats) if f.name.startswith("total_") and not f.name.startswith(_NOT_COUNTED)]


class Counts:
    """Counters under the field names of Stats, and times and sizes of the steps."""

    def __init__(self) -> None:
        self.totals: dict[str, Any] = dict.fromkeys(_COUNTED, 0)
        self._step_tokens = Histogram(STEP_TOKEN_BOUNDS)
        self._batches: dict[int, list[float]] = {}  # batch size -> number of steps, and seconds they took
        self._compute_s = 0.0
        self._accepted: list[int] = []  # by position in the draft

    def add(self, name: str, count: int = 1) -> None:
        """Add `count` to a total; `name` is a field of Stats."""
        self.totals[name] += count

    def step(self, num_seqs: int, num_tokens: int, compute_s: float) -> None:
        """Record a step that took `compute_s` seconds on the rank. One without tokens only moved blocks."""
        self._compute_s += compute_s
        if num_seqs:
            self._step_tokens.add(num_tokens)
            times = self._batches.setdefault(num_seqs, [0, 0.0])
            times[0] += 1
            times[1] += compute_s

    def drafts(self, num_drafted: int, num_accepted: int) -> None:
        """Record what became of one sequence's draft, if it had one."""
        if num_drafted:
            self.add("total_drafts")
            self.add("total_draft_tokens", num_drafted)
            self.add("total_accepted_tokens", num_accepted)
            self._accepted += [0] * (num_accepted - len(self._accepted))
            for position in range(num_accepted):
                self._accepted[position] += 1

    def stats(self, gauges: Mapping[str, Any], tier: Mapping[str, Any]) -> Stats:
        """The Stats of this moment; `gauges` and `tier` are keyed by field names of Stats too."""
        return Stats(
            **gauges,
            **self.totals,
            **tier,
            total_compute_s=self._compute_s,
            accepted_by_position=tuple(self._accepted),
            step_tokens=self._step_tokens.copy(),
            batches=tuple(BatchTimes(num, int(steps), took_s) for num, (steps, took_s) in self._batches.items()),
        )


def gauges(seqs: Sequence[Seq], pool: BlockPool, max_batch: int, state_bytes: int) -> dict[str, Any]:
    """The gauges of this moment, by field names of Stats. `state_bytes`: of one state."""
    statuses = [seq.status for seq in seqs]
    num_running = statuses.count(Status.RUNNING)
    return {
        "max_batch": max_batch,
        "num_running": num_running,
        "num_waiting": len(statuses) - num_running,
        "num_loading": statuses.count(Status.LOADING),
        "num_blocks": pool.num_blocks,
        "num_free_blocks": pool.num_free,
        "num_window_blocks": pool.windows.num_blocks if pool.windows else 0,
        "num_free_window_blocks": pool.windows.num_free if pool.windows else 0,
        "num_cached_blocks": pool.num_cached,
        "num_evicted_blocks": pool.num_evicted,
        "num_snapshots": pool.snapshots.count,
        "max_snapshots": pool.snapshots.most,
        "snapshot_bytes": pool.snapshots.count * state_bytes,
        "num_evicted_snapshots": pool.snapshots.num_evicted,
        "num_swapped": sum(bool(seq.host_blocks) for seq in seqs),
        "num_host_blocks": pool.host.count,
        "num_free_host_blocks": pool.host.num_free,
    }
