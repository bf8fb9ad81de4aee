"""Sequences, steps and plans: the data that the scheduler reads and writes."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import msgspec

from kvloom.contract.states import chain_hash
from kvloom.engine.schedule.blocks import Switch, extend_chain, parent_hash
from kvloom.engine.schedule.giving import Giving
from kvloom.engine.schedule.repute import Repute
from kvloom.engine.schedule.snapshots import Snapshot


class Status(Enum):
    """Where a sequence is between its arrival and its end."""

    WAITING = "waiting"  # holds no block
    LOADING = "loading"  # holds no block; a transfer from the outer KV tier fills some for it, then it waits again
    RUNNING = "running"  # holds the blocks of its computed tokens
    FINISHED = "finished"  # holds no block, will never run again


@dataclass(slots=True, eq=False)
class Seq:
    """One sequence. The engine thread owns it; plan_step only reads it."""

    id: int
    token_ids: list[int]  # prompt, then answer
    num_prompt: int
    salt: str = ""
    switch: Switch | None = None  # a step computes tokens on one side of it
    may_reuse: bool = True  # False: every prompt token must be computed, because something of each is wanted
    is_whole: bool = False  # its tokens attend to later ones: computed in one step, and its blocks are never shared
    scored_from: int | None = None  # log-probabilities of the prompt's tokens from this position on are wanted
    status: Status = Status.WAITING
    num_computed: int = 0  # tokens whose keys and values are in block_table
    num_computing: int = 0  # tokens after those, computed by steps under way; block_table has room for them
    block_table: list[int] = field(default_factory=list)
    window_table: list[int] = field(default_factory=list)  # of WindowPool, if there is one; as long as block_table
    num_dropped: int = 0  # blocks at the beginning of window_table that no step reads and that it does not hold
    hashes: list[bytes] = field(default_factory=list)  # hashes of the full blocks of token_ids
    part_hash: bytes = b""  # of the tokens behind the reusable blocks and before the first that must be computed
    num_published: int = 0  # blocks of block_table that are published
    num_cached: int = 0  # prompt tokens found in the cache at first admission
    num_preemptions: int = 0
    host_blocks: list[int] = field(default_factory=list)  # copies of its blocks while it is swapped out
    host_state: list[int] = field(default_factory=list)  # the host blocks with its state meanwhile
    states: list[int] = field(default_factory=list)  # its place among the states, while it runs a model with such;
    # behind it, while drafts are computed, the place with the state before them
    has_gone_back: bool = False  # to that place; its next work says so
    marks: list["Mark"] = field(default_factory=list)  # where snapshots of its state are to be taken, in order
    keeping: list["Keep"] = field(default_factory=list)  # those that steps under way take
    base: Snapshot | None = None  # the last one that it began with or that was taken of it
    num_swapped: int = 0  # tokens whose keys and values are in host_blocks
    priority: int = 0  # of the request
    max_len: int = 0  # tokens it can reach, answer included; reserved at admission when preemption is off
    is_asked: bool = False  # the outer tier was asked for its blocks since it began to wait
    loading: tuple[bytes, ...] = ()  # hashes of the blocks that it waits for from there
    draft: list[int] = field(default_factory=list)  # drafts of the tokens behind token_ids
    may_run_ahead: bool = True  # False: its next step depends on the token before; see ahead.py
    turn: float = 0.0  # sort key by priority, deadline and fairness; see policies.Turns
    repute: Repute | None = None  # None = no rank has died while computing it
    giving: Giving | None = None  # set when its prompt's blocks are for another engine

    @property
    def held_windows(self) -> list[int]:
        """The blocks of window_table that it holds."""
        return self.window_table[self.num_dropped :]

    def extend_hashes(self, block_size: int) -> None:
        """Add the hashes of the full blocks of token_ids that `hashes` lacks."""
        extend_chain(self.hashes, self.token_ids, block_size, self.salt, self.switch)
        count = self.num_in_part(block_size)
        if count and not self.part_hash:
            first = self.part_index(block_size)
            parent = self.parent_hash(first, block_size)
            self.part_hash = chain_hash(parent, self.token_ids[first * block_size : first * block_size + count])

    def part_index(self, block_size: int) -> int:
        """The index of the block in which it must compute its first token."""
        return max(0, min(len(self.token_ids), self.scored_from or 0) - 1) // block_size

    def num_in_part(self, block_size: int) -> int:
        """How many tokens of that block it waits for while others compute them. Only prompts of which the last tokens
        are scored do: several of them are asked for at once.
        """
        if self.scored_from is None or not self.may_reuse or self.switch is not None:
            return 0
        return max(0, min(len(self.token_ids), self.scored_from) - 1) % block_size

    def reach(self, start: int, count: int, stop: int = 0) -> int:
        """How many of `count` tokens from `start` on one step may compute. `stop`: position at which it must end."""
        at = self.switch.at if self.switch is not None else 0
        count = min(count, at - start) if start < at else count
        return min(count, stop - start) if start < stop else count

    @property
    def num_reusable(self) -> int:
        """How many tokens it may find computed: its last one is computed in any case, and so is the one before the
        first scored one.
        """
        if not self.may_reuse:
            return 0
        most = len(self.token_ids) if self.scored_from is None else min(len(self.token_ids), self.scored_from)
        return max(0, most - 1)

    def reusable(self, block_size: int) -> list[bytes]:
        """Hashes of the blocks that it may find computed."""
        return self.hashes[: self.num_reusable // block_size]

    def parent_hash(self, index: int, block_size: int) -> bytes:
        """What the hash of its block `index` continues."""
        return parent_hash(self.hashes, index, block_size, self.salt, self.switch)

    def num_scored(self, start: int, count: int) -> int:
        """Of `count` tokens from `start` on, those behind which the log-probability of the next one is wanted."""
        if self.scored_from is None:
            return 0
        return max(0, min(start + count, self.num_prompt) - max(start, self.scored_from - 1))

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities are wanted of the prompt's tokens that come next."""
        return self.scored_from is not None and self.next_start >= self.scored_from - 1

    @property
    def num_pending(self) -> int:
        """Tokens that are known, but neither computed nor under way; 1 while decoding."""
        pending = len(self.token_ids) - self.num_computed - self.num_computing
        return pending if pending > 1 else 1

    @property
    def next_start(self) -> int:
        """Position where its next step begins. For a decode that token is known by then."""
        return self.num_computed + self.num_computing

    @property
    def is_ending(self) -> bool:
        """Whether the token under way reaches its maximum length, so that nothing is left to compute."""
        return self.num_computing > 0 and self.next_start >= max(len(self.token_ids), self.max_len - 1)

    @property
    def is_suspect(self) -> bool:
        """Whether it may have caused the death of a rank."""
        return self.repute is not None and self.repute.is_suspect(len(self.token_ids))


class Mark(NamedTuple):
    """A snapshot is to be taken behind `position` tokens; `key` is their hash, as of a block that ends there."""

    position: int
    key: bytes
    is_lasting: bool = True  # it is worth a place in the outer tier: an end of a prompt, or where prompts part


class Keep(NamedTuple):
    """A step copies the state at `mark` to `place`."""

    mark: Mark
    place: int


class SeqStep(msgspec.Struct, frozen=True):
    """`num_tokens` more tokens of `seq`, from position `start`, needing `num_new_blocks` more blocks.

    `hits` are cached blocks that a newly admitted sequence starts with; the blocks from there to `start` are copied
    back from the host, or the one in which it starts is first a copy of block `part` (-1 = none). The last len(draft)
    tokens are guesses. A newly admitted sequence begins with the state of `snapshot`, and gets `marks`.
    """

    seq: Seq
    start: int
    num_tokens: int
    num_new_blocks: int
    hits: tuple[int, ...] = ()
    draft: tuple[int, ...] = ()
    part: int = -1
    snapshot: Snapshot | None = None
    marks: tuple[Mark, ...] = ()
    num_passed: int = 0  # tokens by which it misses the snapshot of a prompt that it leaves just before its end
    # tokens behind the start whose keys and values are known, of no use without a state or those of a window
    num_unusable: int = 0
    windows: tuple[int, ...] = ()  # these as in Prefix, of a newly admitted sequence
    num_dropped: int = 0
    part_window: int = -1


class LoadStep(msgspec.Struct, frozen=True):
    """Ask the outer tier for the blocks `keys` of a waiting `seq`; they follow its cached blocks `hits`.

    Where layers keep states: for a state behind at least `least` tokens, and the blocks before that; `snapshot` is the
    one that it would begin with. Where layers have blocks of a window: for a prefix of at least so many tokens, and
    `num_windows` blocks of its last window. `asked` names what it waits for.
    """

    seq: Seq
    hits: tuple[int, ...]
    keys: tuple[bytes, ...]
    asked: tuple[bytes, ...]
    least: int = 0
    snapshot: Snapshot | None = None
    num_windows: int = 0


class Plan(msgspec.Struct, frozen=True):
    """One step: what is computed, which sequences are preempted for it, what the outer tier is asked for."""

    steps: tuple[SeqStep, ...] = ()
    preempted: tuple[Seq, ...] = ()
    swapped: tuple[Seq, ...] = ()  # those of the preempted that are swapped out
    loads: tuple[LoadStep, ...] = ()


def num_blocks_of(num_tokens: int, block_size: int) -> int:
    """Number of blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)
