"""Blocks on their way between the block pool and an outer KV tier: the engine's side. Pure; time is an argument.

A transfer holds its blocks, as a sequence does, until the rank reports it. So no byte is written to or read from a
block of another sequence, whichever request aborts, stops waiting or runs out of blocks. A loaded block is published
like a computed one, and the sequence that waited for it is admitted with a prefix hit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvloom.contract.messages import Moved, Transfer
from kvloom.engine.schedule.blocks import BlockPool
from kvloom.engine.schedule.giving import Giving
from kvloom.engine.schedule.seq import LoadStep, Seq, SeqStep, Status

PATIENCE = 1.2  # the tier reports within its deadline; the engine waits this factor longer, then computes
MAX_SAVING = 4  # saves hold at most one block in so many


@dataclass(slots=True)
class _Load:
    seq: Seq | None  # the sequence that waits for it; None = none any more
    hits: tuple[int, ...]
    transfer: Transfer
    until_s: float  # until when the sequence waits; the blocks stay held longer


class Transfers:
    """Loads and saves under way, and those for the next batch. Owned by the engine."""

    def __init__(self, pool: BlockPool, timeout_s: float | None) -> None:
        """`timeout_s`: longest time of a load; None = there is no outer tier."""
        self._pool = pool
        self._timeout_s = timeout_s
        self._next_id = 0
        self._loads: dict[int, _Load] = {}
        self._saves: dict[int, Transfer] = {}
        self._givings: dict[int, Giving] = {}  # transfer id -> the sequence whose prompt is given to another engine
        self._new_loads: list[Transfer] = []
        self._new_saves: list[Transfer] = []
        self._num_saving = 0
        self._stored: dict[int, bytes] = {}  # block -> key under which the tier was given it, or gave it
        self._is_up = timeout_s is not None
        self.pool = ""  # name of the tier's store, once known
        self._num_loaded = 0
        self._num_saved = 0

    @property
    def is_pending(self) -> bool:
        """Whether a transfer must be sent to the rank or reported by it."""
        return bool(self._loads or self._saves)

    def may_ask(self, is_idle: bool) -> bool:
        """Whether to ask the tier: it is up, or no sequence runs that a refusal would delay."""
        return self._timeout_s is not None and (self._is_up or is_idle)

    def load(self, steps: Iterable[LoadStep], now_s: float) -> None:
        """Allocate the blocks of each load and let its sequence wait. The plan reserved them; apply_step retained the
        hits.
        """
        for step in steps:
            blocks = self._pool.allocate(len(step.keys))
            assert blocks is not None, "the plan promised blocks that are not free"
            transfer = Transfer(self._draw_id(), blocks, list(step.keys))
            until_s = now_s + PATIENCE * (self._timeout_s or 0.0)
            self._loads[transfer.id] = _Load(step.seq, step.hits, transfer, until_s)
            self._new_loads.append(transfer)
            step.seq.status, step.seq.loading, step.seq.is_asked = Status.LOADING, step.keys, True

    def save(self, chains: Iterable[Sequence[int]]) -> None:
        """Save newly published blocks, one transfer a chain, while the share of blocks for saves lasts."""
        if self._timeout_s is None or not self._is_up:
            return
        for chain in chains:
            blocks = list(chain[: max(0, self._pool.num_blocks // MAX_SAVING - self._num_saving)])
            keys = [key for block in blocks if (key := self._pool.key_of(block)) is not None]
            assert len(keys) == len(blocks), "a block without a hash is to be saved"
            if blocks:
                self._num_saving += len(blocks)
                self._begin_save(blocks, keys)

    def save_missing(self, steps: Iterable[SeqStep]) -> None:
        """Save the cached blocks that new sequences start with and that the tier was not given since it is up: it was
        down when they were computed, or the share of blocks for saves was used up.
        """
        missing = (
            [block for block in step.hits if self._stored.get(block) != self._pool.key_of(block)]
            for step in steps
            if step.seq.giving is None
        )
        self.save(blocks for blocks in missing if blocks)

    def give(self, seqs: Iterable[Seq]) -> None:
        """Save the computed blocks of prompts that another engine takes up: all of them, whatever the share for saves.

        Blocks that the tier holds already are sent again, because the engine cannot know what the tier has dropped; the
        tier skips them.
        """
        for seq in seqs:
            if (giving := seq.giving) is None:
                continue
            new = slice(giving.num_sent, min(giving.num_blocks, seq.num_published))
            if blocks := seq.block_table[new]:
                transfer = self._begin_save(blocks, seq.hashes[new])
                giving.sent(transfer.id, len(blocks))
                self._givings[transfer.id] = giving

    def _begin_save(self, blocks: list[int], keys: list[bytes]) -> Transfer:
        self._pool.retain(blocks)
        transfer = Transfer(self._draw_id(), blocks, keys)
        self._saves[transfer.id] = transfer
        self._stored.update(zip(blocks, keys, strict=True))
        self._new_saves.append(transfer)
        return transfer

    def counts(self) -> dict[str, int]:
        """Totals since the rank started, and blocks under way, by field names of Stats."""
        return {
            "total_tier_loaded_blocks": self._num_loaded,
            "total_tier_saved_blocks": self._num_saved,
            "num_saving_blocks": self._num_saving,
        }

    def take_new(self) -> tuple[list[Transfer], list[Transfer]]:
        """Transfers that the rank has not been sent yet."""
        new = self._new_loads, self._new_saves
        self._new_loads, self._new_saves = [], []
        return new

    def finish(self, reports: Iterable[Moved], is_tier_up: bool, pool: str = "") -> None:
        """Handle the rank's reports. Unknown ids are ignored, and impossible counts count as 0."""
        if is_tier_up and not self._is_up:
            self._stored.clear()  # it may have lost what it had
        self._is_up, self.pool = is_tier_up, pool or self.pool
        for report in reports:
            load, save = self._loads.pop(report.id, None), self._saves.pop(report.id, None)
            transfer = load.transfer if load else save
            if transfer is None:
                continue
            count = report.num_blocks if 0 <= report.num_blocks <= len(transfer.blocks) else 0
            if load:
                self._finish_load(load, count)
            else:
                self._finish_save(transfer, count)

    def _finish_save(self, transfer: Transfer, count: int) -> None:
        self._num_saved += count
        giving = self._givings.pop(transfer.id, None)
        if giving is None:
            self._num_saving -= len(transfer.blocks)
        else:
            giving.finish(transfer.id, count)
        self._pool.release(transfer.blocks)

    def _finish_load(self, load: _Load, count: int) -> None:
        blocks, keys = load.transfer.blocks, load.transfer.keys
        for block, key in zip(blocks[:count], keys[:count], strict=True):
            self._pool.publish(block, key)
            self._stored[block] = key
        self._num_loaded += count
        self._pool.release([*load.hits, *blocks])
        _wake(load)

    def expire(self, now_s: float) -> None:
        """Let sequences whose deadline has passed go on without their load; the transfers stay under way."""
        for load in self._loads.values():
            if now_s >= load.until_s:
                _wake(load)

    def held(self) -> list[int]:
        """All held blocks, listed once a transfer."""
        loads = [block for load in self._loads.values() for block in (*load.hits, *load.transfer.blocks)]
        return loads + [block for save in self._saves.values() for block in save.blocks]

    def _draw_id(self) -> int:
        self._next_id += 1
        return self._next_id


class Moves:
    """Merges the reports of several ranks: a transfer has ended when all report it; the smallest number of blocks
    counts.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._counts: dict[int, list[int]] = {}  # transfer id -> blocks moved, for each rank that has reported

    def merge(self, reports: Sequence[Sequence[Moved]]) -> list[Moved]:
        """The transfers that ended with these reports; one list of reports a rank."""
        finished = []
        for report in (report for of_rank in reports for report in of_rank):
            counts = self._counts.setdefault(report.id, [])
            counts.append(report.num_blocks)
            if len(counts) == self._num_ranks:
                finished.append(Moved(report.id, min(counts)))
                del self._counts[report.id]
        return finished


def _wake(load: _Load) -> None:
    seq, load.seq = load.seq, None
    if seq is not None and seq.status is Status.LOADING:
        seq.status, seq.loading = Status.WAITING, ()
