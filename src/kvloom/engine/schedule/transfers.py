"""Blocks on their way between the block pool and an outer KV tier: the engine's side. Pure; time is an argument.

A transfer holds its blocks, as a sequence does, until the rank reports it. So no byte is written to or read from a
block of another sequence, whichever request aborts, stops waiting or runs out of blocks. A loaded block is published
like a computed one, and the sequence that waited for it is admitted with a prefix hit.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvloom.contract.messages import Batch, Moved, Transfer
from kvloom.contract.states import FoundState, KeptState, Search, chain_hash
from kvloom.contract.windows import WindowBlocks
from kvloom.engine.schedule.blocks import BlockPool
from kvloom.engine.schedule.giving import Giving
from kvloom.engine.schedule.keeping import Lies, Origin, add_state, publish_as
from kvloom.engine.schedule.seq import LoadStep, Seq, SeqStep, Status, num_blocks_of
from kvloom.engine.schedule.snapshots import Snapshot, known_base

PATIENCE = 1.2  # the tier reports within its deadline; the engine waits this factor longer, then computes
MAX_SAVING = 4  # saves hold at most one block in so many
MAX_SAVING_STATES = 4  # the rank has a copy of each while it is saved


@dataclass(slots=True)
class _Load:
    seq: Seq | None  # the sequence that waits for it; None = none any more
    step: LoadStep
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
        self._new_found: list[FoundState] = []
        self._num_saving = 0
        self._num_saving_states = 0
        self._due_states: dict[Snapshot, None] = {}  # those that are saved when others have arrived
        self._stored: dict[int, bytes] = {}  # block -> key under which the tier was given it, or gave it
        self._stored_states: dict[int, bytes] = {}  # the same of places
        self._is_up = timeout_s is not None
        self.pool = ""  # name of the tier's store, once known
        self._num_loaded = 0
        self._num_saved = 0
        self._num_loaded_states = 0
        self._num_saved_states = 0
        self._num_saving_windows = self._num_loaded_windows = self._num_saved_windows = 0
        self._stored_windows: dict[int, bytes] = {}  # as _stored, of a window's blocks

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
            transfer = Transfer(self._draw_id(), blocks, list(step.keys), self._search(step), None, self._asked(step))
            until_s = now_s + PATIENCE * (self._timeout_s or 0.0)
            self._loads[transfer.id] = _Load(step.seq, step, transfer, until_s)
            self._new_loads.append(transfer)
            step.seq.status, step.seq.loading, step.seq.is_asked = Status.LOADING, step.asked, True

    def _search(self, step: LoadStep) -> Search | None:
        """None where layers keep no states."""
        size, seq = self._pool.snapshots.block_size, step.seq
        if not self._pool.snapshots.most:
            return None
        first, most = step.least // size, seq.num_reusable
        parents = [seq.parent_hash(index, size) for index in range(first, num_blocks_of(most, size))]
        return Search(step.least, len(step.hits), first, parents, seq.token_ids[first * size : most])

    def _asked(self, step: LoadStep) -> WindowBlocks | None:
        """None where layers with a window have no blocks of their own. Without free ones nothing can be found."""
        pool, seq = self._pool.windows, step.seq
        if pool is None:
            return None
        size = pool.block_size
        first, blocks = pool.first_of(step.least), pool.allocate(step.num_windows) or []
        keys = seq.hashes[first : seq.num_reusable // size]
        return WindowBlocks(blocks, keys, first, len(step.hits), step.least // size)

    def save(self, chains: Iterable[Sequence[int]]) -> None:
        """Save newly published blocks, one transfer a chain, while the share of blocks for saves lasts, and new lasting
        snapshots, and newly published blocks of a window.
        """
        states, pool = self._pool.snapshots.take_fresh(), self._pool.windows
        windows = pool.take_fresh() if pool is not None else {}
        if self._timeout_s is None or not self._is_up:
            return
        self._due_states |= dict.fromkeys(states)
        self._save_states()
        self._save_windows(windows)
        for chain in chains:
            blocks = list(chain[: max(0, self._pool.num_blocks // MAX_SAVING - self._num_saving)])
            keys = [key for block in blocks if (key := self._pool.key_of(block)) is not None]
            assert len(keys) == len(blocks), "a block without a hash is to be saved"
            if blocks:
                self._num_saving += len(blocks)
                self._begin_save(blocks, keys)

    def _save_states(self) -> None:
        """Save the states that are due, if the tier was not given them since it is up; few at once."""
        due = [
            each
            for each in self._due_states
            if not each.is_forgotten and self._stored_states.get(each.place) != chain_hash(each.parent, each.tail)
        ]
        count = MAX_SAVING_STATES - self._num_saving_states
        for each in due[:count]:
            self._begin_state(each)
            self._num_saving_states += 1
        self._due_states = dict.fromkeys(due[count:])

    def _save_windows(self, found: Mapping[int, bytes]) -> None:
        """Save the blocks that the tier was not given since it is up, the last ones first while the share for saves
        lasts: the rank copies them.
        """
        if self._pool.windows is None:
            return
        new = [(block, key) for block, key in found.items() if self._stored_windows.get(block) != key]
        room = max(0, self._pool.windows.num_blocks // MAX_SAVING - self._num_saving_windows)
        new = new[max(0, len(new) - room) :]
        if new:
            self._num_saving_windows += len(new)
            self._begin_windows(*zip(*new, strict=True))

    def _begin_windows(self, blocks: Sequence[int], keys: Sequence[bytes]) -> Transfer:
        transfer = Transfer(self._draw_id(), [], [], windows=WindowBlocks(list(blocks), list(keys)))
        self._saves[transfer.id] = transfer
        self._new_saves.append(transfer)
        self._stored_windows.update(zip(blocks, keys, strict=True))
        return transfer

    def _begin_state(self, snapshot: Snapshot) -> Transfer:
        key = chain_hash(snapshot.parent, snapshot.tail)
        block = snapshot.block if len(snapshot.tail) < self._pool.snapshots.block_size else -1
        transfer = Transfer(self._draw_id(), [], [], state=KeptState(snapshot.place, block, key))
        self._saves[transfer.id] = transfer
        self._new_saves.append(transfer)
        self._stored_states[snapshot.place] = key
        return transfer

    def save_missing(self, steps: Sequence[SeqStep]) -> None:
        """Save the cached blocks and the states that new sequences start with and that the tier was not given since it
        is up: it was down when they were computed, or the share of blocks for saves was used up.
        """
        if self._timeout_s is not None and self._is_up:
            self._due_states |= {step.snapshot: None for step in steps if step.snapshot is not None}
            if (pool := self._pool.windows) is not None:
                known = ((block, pool.key_of(block)) for step in steps for block in step.windows)
                self._save_windows({block: key for block, key in known if key is not None})
        missing = (
            [block for block in step.hits if self._stored.get(block) != self._pool.key_of(block)]
            for step in steps
            if step.seq.giving is None
        )
        self.save(blocks for blocks in missing if blocks)

    def give(self, seqs: Iterable[Seq]) -> None:
        """Save the computed blocks of prompts that another engine takes up: all of them, whatever the share for saves;
        and of each the last state that is taken of it, or the blocks of its last window.

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
            if giving.end is None and (ends := self._end_of(seq, giving)) is not None:
                giving.sent_end(ends[0].id, ends[1])
                self._givings[ends[0].id] = giving

    def _end_of(self, seq: Seq, giving: Giving) -> tuple[Transfer, int] | None:
        """The transfer of what layers keep of its prompt's end, and the full blocks before that; None = it is not
        there, or not yet.
        """
        state = known_base(seq.base) if seq.states else None  # none of one that was aborted
        if state is not None and not (seq.marks or seq.keeping):
            return self._begin_state(state), state.position // self._pool.snapshots.block_size
        pool = self._pool.windows
        if pool is None or seq.num_published < giving.num_blocks:
            return None
        at = (seq.num_prompt - 1) // pool.block_size
        keys = seq.hashes[pool.first_of(at * pool.block_size) : at]
        blocks = [block for key in keys if (block := pool.block_of(key)) is not None]
        return (self._begin_windows(blocks, keys), at) if blocks and len(blocks) == len(keys) else None

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
            "num_saving_states": self._num_saving_states + len(self._due_states),
            "total_tier_loaded_states": self._num_loaded_states,
            "total_tier_saved_states": self._num_saved_states,
            "total_tier_loaded_windows": self._num_loaded_windows,
            "total_tier_saved_windows": self._num_saved_windows,
        }

    def fill(self, batch: Batch) -> None:
        """Add what the rank has not been sent yet."""
        batch.loads, batch.saves, batch.found = self._new_loads, self._new_saves, self._new_found
        self._new_loads, self._new_saves, self._new_found = [], [], []

    def finish(self, reports: Iterable[Moved], is_tier_up: bool, pool: str = "") -> None:
        """Handle the rank's reports. Unknown ids are ignored, and impossible counts count as 0."""
        if is_tier_up and not self._is_up:
            self._stored.clear()  # it may have lost what it had
            self._stored_states.clear()
            self._stored_windows.clear()
        if not is_tier_up:
            self._due_states.clear()
        self._is_up, self.pool = is_tier_up, pool or self.pool
        for report in reports:
            load, save = self._loads.pop(report.id, None), self._saves.pop(report.id, None)
            transfer = load.transfer if load else save
            if transfer is None:
                continue
            most = len(transfer.blocks) + (transfer.state is not None)
            most += len(transfer.windows.blocks) if save and transfer.windows else 0
            count = report.num_blocks if 0 <= report.num_blocks <= most else 0
            if load:
                self._finish_load(load, count, report.position)
            else:
                self._finish_save(transfer, count)
        self._save_states()

    def _finish_save(self, transfer: Transfer, count: int) -> None:
        giving = self._givings.pop(transfer.id, None)
        if giving is not None:
            is_part = transfer.windows is not None and count < len(transfer.windows.blocks)
            giving.finish(transfer.id, 0 if is_part else count)
        if transfer.windows is not None:
            self._num_saved_windows += count
            self._num_saving_windows -= 0 if giving else len(transfer.windows.blocks)
        elif transfer.state is not None:
            self._num_saved_states += count
            self._num_saving_states -= 0 if giving else 1
        else:
            self._num_saved += count
            self._num_saving -= 0 if giving else len(transfer.blocks)
        self._pool.release(transfer.blocks)

    def _finish_load(self, load: _Load, count: int, position: int) -> None:
        blocks, keys, step, size = load.transfer.blocks, load.transfer.keys, load.step, self._pool.snapshots.block_size
        for i, (block, key) in enumerate(zip(blocks[:count], keys[:count], strict=True)):
            publish_as(step.seq, len(step.hits) + i, block, self._pool, size)
            self._stored[block] = key
        self._num_loaded += count
        if load.transfer.search is not None:
            num_known = len(step.hits) + count
            self._new_found.append(self._found(load, load.transfer.search, position, num_known))
        if load.transfer.windows is not None:
            self._take_windows(step.seq, load.transfer.windows, position, len(step.hits) + count)
        self._pool.release([*step.hits, *blocks])
        _wake(load)

    def _take_windows(self, seq: Seq, windows: WindowBlocks, position: int, num_known: int) -> None:
        """Publish the blocks of the window that was loaded before `position`. `num_known`: blocks of the prompt that
        are known.
        """
        pool = self._pool.windows
        assert pool is not None, "there are blocks of a window"
        end, past = divmod(position, pool.block_size)
        if not past and windows.least <= end <= num_known:
            first = pool.first_of(position)
            self._num_loaded_windows += end - first
            for block, key in zip(windows.blocks, seq.hashes[first:end], strict=False):
                pool.publish(block, key)
                self._stored_windows[block] = key
        pool.release(windows.blocks)

    def _found(self, load: _Load, search: Search, position: int, num_known: int) -> FoundState:
        """Where the state goes that was found behind `position` tokens: it becomes a snapshot if there is room, and for
        the block that ends with its last token. `num_known`: blocks of the prompt that are known.
        """
        pool, step, size = self._pool, load.step, self._pool.snapshots.block_size
        nowhere, end = FoundState(load.transfer.id), search.first * size + len(search.token_ids)
        if not (search.least <= position <= end and position // size <= num_known):
            return nowhere
        if not pool.snapshots.make_room(position, step.snapshot, is_wanted=True):
            return nowhere
        places = pool.states.allocate(1)
        assert places is not None, "there are places for all snapshots"
        (place,) = places
        blocks = pool.allocate(1) if position % size else []
        if blocks is None:
            pool.snapshots.give_up(place)
            return nowhere
        (end_block,) = blocks or [[*step.hits, *load.transfer.blocks][position // size - 1]]
        added = add_state(step.seq, position, Lies(place, end_block), pool, Origin(step.snapshot))
        pool.release(blocks)
        if added.place != place:
            return nowhere
        self._stored_states[place] = chain_hash(added.parent, added.tail)
        self._num_loaded_states += 1
        return FoundState(load.transfer.id, place, *blocks)

    def expire(self, now_s: float) -> None:
        """Let sequences whose deadline has passed go on without their load; the transfers stay under way."""
        for load in self._loads.values():
            if now_s >= load.until_s:
                _wake(load)

    def held(self) -> tuple[list[int], list[int]]:
        """All held blocks, listed once a transfer, and those of a window. When these are saved they are copied, and so
        not held.
        """
        loads = [block for load in self._loads.values() for block in (*load.step.hits, *load.transfer.blocks)]
        asked = (load.transfer.windows for load in self._loads.values())
        windows = [block for each in asked if each is not None for block in each.blocks]
        return loads + [block for save in self._saves.values() for block in save.blocks], windows

    def _draw_id(self) -> int:
        self._next_id += 1
        return self._next_id


class Moves:
    """Merges the reports of several ranks: a transfer has ended when all report it; the smallest number of blocks
    counts, and a state that all have found at the same position.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._reports: dict[int, list[Moved]] = {}  # by transfer, of each rank that has reported it

    def merge(self, reports: Sequence[Sequence[Moved]]) -> list[Moved]:
        """The transfers that ended with these reports; one list of reports a rank."""
        finished = []
        for report in (report for of_rank in reports for report in of_rank):
            known = self._reports.setdefault(report.id, [])
            known.append(report)
            if len(known) == self._num_ranks:
                (position, *others) = {each.position for each in known}
                finished.append(Moved(report.id, min(each.num_blocks for each in known), 0 if others else position))
                del self._reports[report.id]
        return finished


def _wake(load: _Load) -> None:
    seq, load.seq = load.seq, None
    if seq is not None and seq.status is Status.LOADING:
        seq.status, seq.loading = Status.WAITING, ()
