"""Blocks on their way between the block pool and an outer KV tier: the engine's side. Pure; time is an argument.

A transfer holds its blocks, as a sequence would, until the rank reports it: whoever aborts, gives up waiting or runs
out of blocks, no byte is written to or read from a block that belongs to somebody else. A loaded block is published
like a computed one, so that the sequence which waited for it is admitted with a prefix hit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvloom.contract.messages import Moved, Transfer
from kvloom.engine.schedule.blocks import BlockPool
from kvloom.engine.schedule.giving import Giving
from kvloom.engine.schedule.seq import LoadStep, Seq, Status

PATIENCE = 1.2  # the tier reports within its deadline; the engine itself waits this much longer, then computes
MAX_SAVING = 4  # one block in so many, at most, is held for saves


@dataclass(slots=True)
class _Load:
    seq: Seq | None  # who waits for it; None = nobody any more
    hits: tuple[int, ...]
    transfer: Transfer
    until_s: float  # when the sequence stops waiting; the blocks stay held


class Transfers:
    """The loads and saves under way, and those that the next batch takes along. Owned by the engine."""

    def __init__(self, pool: BlockPool, timeout_s: float | None) -> None:
        """timeout_s: how long a load may take; None = there is no outer tier."""
        self._pool = pool
        self._timeout_s = timeout_s
        self._next_id = 0
        self._loads: dict[int, _Load] = {}
        self._saves: dict[int, Transfer] = {}
        self._givings: dict[int, Giving] = {}  # whose prompt a save is of, that is given to another engine
        self._new_loads: list[Transfer] = []
        self._new_saves: list[Transfer] = []
        self._num_saving = 0
        self._is_up = timeout_s is not None
        self.pool = ""  # which one the tier is, once it is known
        self._num_loaded = 0
        self._num_saved = 0

    @property
    def is_pending(self) -> bool:
        """Whether something is to be sent to the rank, or to be reported by it."""
        return bool(self._loads or self._saves)

    def may_ask(self, is_idle: bool) -> bool:
        """Whether loads are worth a try: the tier answers, or no step runs that a refusal would have to wait for."""
        return self._timeout_s is not None and (self._is_up or is_idle)

    def load(self, steps: Iterable[LoadStep], now_s: float) -> None:
        """Give each load its blocks and let its sequence wait. The plan promised them; apply_step retained the hits."""
        for step in steps:
            blocks = self._pool.allocate(len(step.keys))
            assert blocks is not None, "the plan promised blocks that are not free"
            transfer = Transfer(self._draw_id(), blocks, list(step.keys))
            until_s = now_s + PATIENCE * (self._timeout_s or 0.0)
            self._loads[transfer.id] = _Load(step.seq, step.hits, transfer, until_s)
            self._new_loads.append(transfer)
            step.seq.status, step.seq.loading, step.seq.is_asked = Status.LOADING, step.keys, True

    def save(self, chains: Iterable[Sequence[int]]) -> None:
        """Save newly published blocks, a transfer a chain, as far as the share of blocks for saves goes."""
        if self._timeout_s is None or not self._is_up:
            return
        for chain in chains:
            blocks = list(chain[: max(0, self._pool.num_blocks // MAX_SAVING - self._num_saving)])
            keys = [key for block in blocks if (key := self._pool.key_of(block)) is not None]
            assert len(keys) == len(blocks), "a block without a hash is to be saved"
            if blocks:
                self._num_saving += len(blocks)
                self._begin_save(blocks, keys)

    def give(self, seqs: Iterable[Seq]) -> None:
        """Save what is computed of prompts that another engine takes up: all of it, whatever the share for saves.

        Blocks that the tier has already are saved again, which it notices: nobody here knows what it has dropped.
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
        self._new_saves.append(transfer)
        return transfer

    def counts(self) -> dict[str, int]:
        """What moved since the rank started, and what is on its way, by the names of Stats."""
        return {
            "total_tier_loaded_blocks": self._num_loaded,
            "total_tier_saved_blocks": self._num_saved,
            "num_saving_blocks": self._num_saving,
        }

    def take_new(self) -> tuple[list[Transfer], list[Transfer]]:
        """Loads and saves that the rank has not been told of."""
        new = self._new_loads, self._new_saves
        self._new_loads, self._new_saves = [], []
        return new

    def finish(self, reports: Iterable[Moved], is_tier_up: bool, pool: str = "") -> None:
        """Take what the rank reports. Ids that are not under way, and numbers that cannot be, move nothing."""
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
        self._num_loaded += count
        self._pool.release([*load.hits, *blocks])
        _wake(load)

    def expire(self, now_s: float) -> None:
        """Sequences that have waited long enough go on without; the transfers stay under way."""
        for load in self._loads.values():
            if now_s >= load.until_s:
                _wake(load)

    def held(self) -> list[int]:
        """The blocks held, once a transfer."""
        loads = [block for load in self._loads.values() for block in (*load.hits, *load.transfer.blocks)]
        return loads + [block for save in self._saves.values() for block in save.blocks]

    def _draw_id(self) -> int:
        self._next_id += 1
        return self._next_id


class Moves:
    """What the ranks of a model report of transfers: one is finished when all say so, and as far as all came."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._counts: dict[int, list[int]] = {}  # transfer -> blocks moved, of the ranks that have reported

    def merge(self, reports: Sequence[Sequence[Moved]]) -> list[Moved]:
        """The transfers that finished with these reports, one list a rank."""
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
