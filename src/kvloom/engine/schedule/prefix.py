"""What a waiting sequence may begin with: cached blocks, a copy of a part of one, the state behind them. Pure.

Where layers keep a state, that is the longest prefix of which every block and the state are known; where layers with
a window have blocks of their own, the longest of which every block of all tokens and those of its last window are.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvloom.contract.states import chain_hash
from kvloom.engine.schedule.blocks import BlockPool
from kvloom.engine.schedule.seq import Mark, Seq, num_blocks_of
from kvloom.engine.schedule.snapshots import Snapshot

LEAST_APART = 16  # tokens between snapshots: fewer are computed again as quickly
EVERY = 256  # tokens of a prompt between snapshots, if that makes no more than MOST_REGULAR
MOST_REGULAR = 8


class Prefix(NamedTuple):
    """`start` tokens that need not be computed: those of the blocks `hits`, and of block `part` if it is not -1, which
    is copied.
    """

    hits: list[int]
    start: int
    part: int = -1
    snapshot: Snapshot | None = None  # the state to begin with; None = none, or no layer keeps one
    known: Sequence[int] = ()  # the blocks behind which the outer tier may have more
    lacked: tuple[bytes, ...] = ()  # hashes of those
    asked: tuple[bytes, ...] = ()  # what is asked for: these, or the state at the end of the known; () = nothing
    least: int = 0  # tokens before a state that is asked for, or before the end of a window
    awaited: bytes = b""  # hash of what comes next: if that is being computed for another one, it is waited for
    marks: tuple[tuple[int, bool], ...] = ()  # where snapshots are to be taken, see mark_positions
    num_unusable: int = 0  # of SeqStep
    num_passed: int = 0
    windows: tuple[int, ...] = ()  # of a window's blocks, those before the start that are known
    num_dropped: int = 0  # blocks before these, which no step reads
    part_window: int = -1  # as `part`

    def num_idle_windows(self, pool: BlockPool) -> int:
        """The same of a window's blocks."""
        if pool.windows is None:
            return 0
        part = self.part_window >= 0 and pool.windows.is_idle(self.part_window)
        return sum(map(pool.windows.is_idle, self.windows)) + part

    def num_idle(self, pool: BlockPool) -> int:
        """Blocks that are free now and become used."""
        return sum(map(pool.is_idle, self.hits)) + (self.part >= 0 and pool.is_idle(self.part))


def find_prefix(seq: Seq, pool: BlockPool, block_size: int, may_copy: bool = True) -> Prefix:
    """The longest prefix that is good for every kind of layer. Without `may_copy` it ends with a block."""
    if pool.snapshots.most:
        return _find_state(seq, pool, block_size, may_copy)
    reusable = seq.reusable(block_size)
    found = _find_blocks(seq, pool, reusable, block_size)
    if seq.host_blocks:
        return found._replace(lacked=tuple(reusable[len(found.known) :]))
    asked, num_full = tuple(reusable[len(found.hits) :]), len(found.hits)
    if asked:
        found = found._replace(
            lacked=tuple(reusable[len(found.known) :]), asked=asked, least=(num_full + 1) * block_size
        )
    if may_copy:
        found = _with_part(seq, found, pool, block_size)
    if found.start < seq.num_reusable:
        found = found._replace(awaited=asked[0] if asked else seq.part_hash)
    return found


def _with_part(seq: Seq, found: Prefix, pool: BlockPool, block_size: int) -> Prefix:
    """The same with the beginning of the next block, as far as a known one begins alike."""
    parent = seq.parent_hash(found.start // block_size, block_size)
    tokens = seq.token_ids[found.start : min(found.start + block_size, seq.num_reusable)]
    part, count = pool.known.find(parent, tokens)
    part_window = -1
    if count and pool.windows is not None:
        part_window, count = pool.windows.known.find(parent, tokens[:count])
    return found._replace(start=found.start + count, part=part, part_window=part_window) if count else found


def _find_blocks(seq: Seq, pool: BlockPool, reusable: list[bytes], block_size: int) -> Prefix:
    """The full blocks among them. Those that wait on the host count as found."""
    hits = pool.match(reusable)
    if pool.windows is None:
        return Prefix(hits, max(len(hits) * block_size, seq.num_swapped), known=hits)
    count, windows = pool.windows.match_end(reusable[: len(hits)])
    if count * block_size > seq.num_swapped or not seq.num_swapped:
        found = Prefix(hits[:count], count * block_size, windows=tuple(windows), num_dropped=count - len(windows))
        return found._replace(num_unusable=(len(hits) - count) * block_size, known=hits)
    start = seq.num_swapped
    return Prefix(hits[: start // block_size], start, num_dropped=pool.windows.first_of(start), known=hits)


def _find_state(seq: Seq, pool: BlockPool, block_size: int, may_copy: bool) -> Prefix:
    """One pass over its blocks: as long as they are known, the last snapshot behind any of them counts."""
    hits: list[int] = []
    best: Snapshot | None = None
    num_known, num_passed, most = 0, 0, seq.num_reusable
    for index in range(num_blocks_of(most, block_size)):
        parent, first = seq.parent_hash(index, block_size), index * block_size
        tokens = seq.token_ids[first : min(first + block_size, most)]
        best = pool.snapshots.find(parent, tokens, 1 if may_copy else block_size) or best
        block = pool.block_of(seq.hashes[index]) if len(tokens) == block_size else None
        if block is None:
            count = pool.snapshots.num_known(parent, tokens)
            num_known = first + count
            if count < len(tokens) and num_known > (best.position if best is not None else 0):
                num_passed = pool.snapshots.num_passed(parent, tokens, count, pool.key_of)
            break
        num_known = first + block_size
        hits.append(block)
    start = best.position if best is not None else 0
    if seq.num_swapped > start:  # its own state waits on the host
        best, start = None, seq.num_swapped
    marks = mark_positions(start, num_known, most, max(num_passed, pool.snapshots.back))
    counts = max(0, num_known - start), num_passed
    part = best.block if best is not None and start % block_size else -1
    awaited = mark_of(seq, *marks[0], block_size).key if marks else b""
    lacked = tuple(seq.reusable(block_size)[len(hits) :])
    least = start + LEAST_APART
    asked = (lacked or (seq.parent_hash(len(hits), block_size),)) if least <= most and not seq.host_blocks else ()
    return Prefix(hits[: start // block_size], start, part, best, hits, lacked, asked, least, awaited, marks, *counts)


def mark_positions(start: int, num_known: int, most: int, back: int = 0) -> tuple[tuple[int, bool], ...]:
    """Where snapshots are taken of a sequence that begins at `start`, and which are lasting: before the last token that
    must be computed (`most`), so that the same prompt finds it, or `back` tokens before, where later prompts leave this
    one; where it leaves what is known of others; and, not lasting, at regular distances.
    """
    found: list[int] = []
    lasting = most - back, num_known
    every = EVERY
    while (most - start) // every > MOST_REGULAR:
        every *= 2
    for position in (*lasting, *range(most // every * every, start, -every)):
        if position - start >= LEAST_APART and all(abs(position - other) >= LEAST_APART for other in found):
            found.append(position)
    return tuple((position, position in lasting) for position in sorted(found))


def mark_of(seq: Seq, position: int, is_lasting: bool, block_size: int) -> Mark:
    """The mark behind `position` > 0 of its tokens."""
    index = (position - 1) // block_size
    tail = seq.token_ids[index * block_size : position]
    return Mark(position, chain_hash(seq.parent_hash(index, block_size), tail), is_lasting)
