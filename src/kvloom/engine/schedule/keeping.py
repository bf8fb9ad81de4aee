"""Taking snapshots: while a prompt is computed, at its marks; and when a sequence ends or gives way, of what it leaves.

The rank runs batches in order. So a place may be given to another owner while a step under way still writes to it, and
a state that a step under way changes counts as changed.
"""

from typing import NamedTuple

from kvloom.contract.messages import Work
from kvloom.engine.schedule.blocks import BlockPool, extend_chain
from kvloom.engine.schedule.seq import Keep, Seq, SeqStep
from kvloom.engine.schedule.snapshots import Snapshot


def begin_keep(step: SeqStep, work: Work, pool: BlockPool) -> None:
    """Let the step's work copy the state behind it, if its sequence has a mark there and the snapshot is worth it."""
    seq, end = step.seq, step.start + step.num_tokens
    if not seq.marks or seq.marks[0].position > end:
        return
    mark = seq.marks.pop(0)
    assert mark.position == end, "a step went past a mark"
    is_wanted = seq.giving is not None and mark.is_lasting  # by another engine
    if pool.snapshots.make_room(end, seq.base, is_wanted):
        found = pool.states.allocate(1)
        assert found is not None, "there are places for all snapshots"
        seq.keeping.append(Keep(mark, found[0]))
        work.kept = found[0]


def publish_kept(seq: Seq, pool: BlockPool) -> None:
    """Let others begin with the states that ended steps have copied. The full blocks before them are published."""
    while seq.keeping and seq.keeping[0].mark.position <= seq.num_computed:
        mark, place = seq.keeping.pop(0)
        seq.base = _add(seq, mark.position, place, pool, mark.is_lasting)


def leave_state(seq: Seq, pool: BlockPool, is_lasting: bool = False) -> None:
    """Before `seq` releases what it holds: its place becomes a snapshot of all that it has computed, steps under way
    included, unless these compute tokens that are not known. It is lasting behind an answer.
    """
    position, block_size = seq.next_start, pool.snapshots.block_size
    is_known = seq.states and pool.snapshots.most and 0 < position <= len(seq.token_ids)
    if not is_known or not pool.snapshots.make_room(position, seq.base):
        return
    extend_chain(seq.hashes, seq.token_ids, block_size, seq.salt, seq.switch)
    for index in range(seq.num_published, position // block_size):
        publish_block(seq, index, pool, block_size)
    _add(seq, position, seq.states.pop(), pool, is_lasting)


def give_up_kept(seq: Seq, pool: BlockPool) -> None:
    """The steps that take snapshots of `seq` do not count any more."""
    for keep in seq.keeping:
        pool.snapshots.give_up(keep.place)
    seq.keeping, seq.marks = [], []


def publish_block(seq: Seq, index: int, pool: BlockPool, block_size: int) -> bool:
    """Publish the full block `index` of its tables. Returns as BlockPool.publish, of the block of all tokens."""
    if pool.windows is not None and index >= seq.num_dropped:
        publish_as(seq, index, seq.window_table[index], pool.windows, block_size)
    return publish_as(seq, index, seq.block_table[index], pool, block_size)


def publish_as(seq: Seq, index: int, block: int, pool: BlockPool, block_size: int) -> bool:
    """Publish `block`, which has the contents of the full block `index` of its tokens."""
    is_new = pool.publish(block, seq.hashes[index])
    if is_new:
        tokens = seq.token_ids[index * block_size : (index + 1) * block_size]
        pool.learn(block, seq.parent_hash(index, block_size), tokens)
    return is_new


def leave_part(seq: Seq, pool: BlockPool, block_size: int, num_tokens: int) -> None:
    """Let others begin with a copy of the block that is not full, which has the last of the first `num_tokens` tokens:
    these are computed. Where layers keep a state, a snapshot must lie there.
    """
    index, count = divmod(num_tokens, block_size)
    if not count or seq.is_whole or not seq.num_dropped <= index < len(seq.block_table):
        return
    extend_chain(seq.hashes, seq.token_ids, block_size, seq.salt, seq.switch)
    parent, tokens = seq.parent_hash(index, block_size), seq.token_ids[index * block_size : num_tokens]
    pool.learn(seq.block_table[index], parent, tokens)
    if pool.windows is not None:
        pool.windows.learn(seq.window_table[index], parent, tokens)


def _add(seq: Seq, position: int, place: int, pool: BlockPool, is_lasting: bool) -> Snapshot:
    block = seq.block_table[(position - 1) // pool.snapshots.block_size]
    return add_state(seq, position, Lies(place, block), pool, Origin(seq.base, is_lasting))


class Lies(NamedTuple):
    """Where a state lies, and the block with the last token before it: if that is full, another one may be known."""

    place: int
    block: int


class Origin(NamedTuple):
    """What is known of a state besides its tokens: the snapshot that it was computed from, and is_lasting of Mark."""

    base: Snapshot | None
    is_lasting: bool = False


def add_state(seq: Seq, position: int, lies: Lies, pool: BlockPool, origin: Origin) -> Snapshot:
    """Add the snapshot, which was let in, behind its first `position` tokens. Returns as Snapshots.add."""
    block_size = pool.snapshots.block_size
    index = (position - 1) // block_size
    tail = tuple(seq.token_ids[index * block_size : position])
    block = lies.block
    if len(tail) == block_size:
        known = pool.block_of(seq.hashes[index])
        block = block if known is None else known
    parent = seq.parent_hash(index, block_size)
    return pool.snapshots.add(Snapshot(position, parent, tail, block, lies.place, *origin))
