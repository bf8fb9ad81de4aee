"""Free: the blocks that a plan may still give out, of each memory. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvloom.contract.windows import most_in_window
from kvloom.engine.schedule.blocks import BlockPool
from kvloom.engine.schedule.prefix import Prefix
from kvloom.engine.schedule.seq import Seq, num_blocks_of

_ENDLESS = 1 << 60


class Need(NamedTuple):
    """Blocks of all tokens, and of the last window's."""

    blocks: int
    windows: int = 0

    def plus(self, other: "Need") -> "Need":
        return Need(self.blocks + other.blocks, self.windows + other.windows)


@dataclass(slots=True)
class Free:
    """Blocks of all tokens, and of the last window's; as good as endless where these have no memory of their own."""

    blocks: int
    windows: int = _ENDLESS

    @property
    def least(self) -> int:
        """Blocks by which a running sequence may grow: it takes as many of both."""
        return min(self.blocks, self.windows)

    def has(self, need: Need) -> bool:
        return need.blocks <= self.blocks and need.windows <= self.windows

    def take(self, need: Need) -> None:
        self.blocks -= need.blocks
        self.windows -= need.windows

    def add_held(self, seq: Seq, pool: BlockPool) -> None:
        """What becomes free if `seq` is preempted."""
        self.blocks += pool.num_exclusive(seq.block_table)
        if pool.windows is not None:
            self.windows += pool.windows.num_exclusive(seq.held_windows)


def free_of(pool: BlockPool) -> Free:
    return Free(pool.num_free) if pool.windows is None else Free(pool.num_free, pool.windows.num_free)


def owed(seqs: Sequence[Seq], promised: Sequence[int], pool: BlockPool) -> Need:
    """What running sequences were promised, `promised` blocks each, and do not have yet."""
    blocks = sum(promised) - sum(len(seq.block_table) for seq in seqs)
    if pool.windows is None:
        return Need(blocks)
    most = pool.windows.most_needed
    windows = (min(count, most) - len(seq.held_windows) for seq, count in zip(seqs, promised, strict=True))
    return Need(blocks, sum(max(0, count) for count in windows))


def taken(found: Prefix, pool: BlockPool) -> Need:
    """Blocks that are free now and become used by a sequence that begins with `found`."""
    return Need(found.num_idle(pool), found.num_idle_windows(pool))


def needed(found: Prefix, count: int, pool: BlockPool) -> Need:
    """What it takes beyond `found`, until its table has `count` blocks. Of a window it never needs more than
    `most_needed`.
    """
    blocks = max(0, count - len(found.hits))
    if pool.windows is None:
        return Need(blocks)
    return Need(blocks, max(0, min(count - found.num_dropped, pool.windows.most_needed) - len(found.windows)))


def asked_windows(seq: Seq, pool: BlockPool) -> int:
    """Blocks of a window that are asked of the outer tier for a sequence."""
    if pool.windows is None:
        return 0
    size = pool.windows.block_size
    return min(most_in_window(pool.windows.reach, size), seq.num_reusable // size)


def step_tokens(pool: BlockPool, num_running: int, block_size: int) -> int:
    """How many tokens of prompts a step may compute: they need a window's blocks until the step has ended. All that are
    free, except one for each running sequence.
    """
    return _ENDLESS if pool.windows is None else max(1, pool.windows.num_free - num_running) * block_size


def room_for(found: Prefix, free: Free, pool: BlockPool, block_size: int) -> int:
    """How many tokens of a sequence that begins with `found` have room in a window's blocks."""
    if pool.windows is None:
        return _ENDLESS
    count = found.num_dropped + len(found.windows) + free.windows - found.num_idle_windows(pool)
    return count * block_size - found.start


def first_step_needs(found: Prefix, end: int, pool: BlockPool, block_size: int) -> Need:
    """What the first step of a sequence takes, up to position `end`."""
    count = num_blocks_of(end, block_size)
    new = Need(count - len(found.hits))
    if pool.windows is not None:
        new = Need(new.blocks, count - found.num_dropped - len(found.windows))
    return taken(found, pool).plus(new)
