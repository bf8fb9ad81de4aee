"""Sequences, and what a plan says of them."""

from dataclasses import dataclass, field
from enum import Enum

import msgspec

from kvloom.engine.schedule.giving import Giving
from kvloom.engine.schedule.repute import Repute


class Status(Enum):
    """Where a sequence is between its arrival and its end."""

    WAITING = "waiting"  # holds no block
    LOADING = "loading"  # holds no block; a transfer fills some for it from the outer KV tier, then it waits again
    RUNNING = "running"  # holds the blocks of its computed tokens
    FINISHED = "finished"  # holds no block, will never run again


@dataclass(slots=True, eq=False)
class Seq:
    """One sequence. The engine thread owns it; plan_step only reads it."""

    id: int
    token_ids: list[int]  # prompt, then answer
    num_prompt: int
    salt: str = ""
    may_reuse: bool = True  # False: every prompt token must be computed (something of each is wanted)
    is_whole: bool = False  # its tokens see those behind them: computed in one step, and its blocks serve nobody else
    is_scored: bool = False  # the log-probability of every prompt token is wanted
    status: Status = Status.WAITING
    num_computed: int = 0  # tokens whose keys and values are in block_table
    num_computing: int = 0  # tokens behind those that steps under way compute; block_table has room for them
    block_table: list[int] = field(default_factory=list)
    num_dropped: int = 0  # blocks at the beginning of block_table that no step reads any more: others may have them
    hashes: list[bytes] = field(default_factory=list)  # of the full blocks of token_ids
    num_published: int = 0  # blocks of block_table that the pool knows by hash
    num_cached: int = 0  # prompt tokens found in the cache at first admission
    num_preemptions: int = 0
    host_blocks: list[int] = field(default_factory=list)  # copies of its blocks, while it waits swapped out
    num_swapped: int = 0  # tokens whose keys and values are in host_blocks
    priority: int = 0  # of the request
    max_len: int = 0  # tokens it can reach, answer included; what admission reserves when preemption is off
    is_asked: bool = False  # the outer tier was asked for its blocks since it last waited
    loading: tuple[bytes, ...] = ()  # hashes of the blocks on their way from there
    draft: list[int] = field(default_factory=list)  # tokens guessed to follow token_ids
    may_run_ahead: bool = True  # False: what it computes next depends on the token before; see ahead.py
    turn: float = 0.0  # virtual time of its turn (priority, deadline, fairness); see policies.Turns
    repute: Repute | None = None  # None = no rank has died while it computed this
    giving: Giving | None = None  # its prompt's blocks are for another engine

    @property
    def held_blocks(self) -> list[int]:
        """Those of block_table that are still its own."""
        return self.block_table[self.num_dropped :] if self.num_dropped else self.block_table

    @property
    def num_pending(self) -> int:
        """Tokens known but neither computed nor under way; 1 while decoding."""
        pending = len(self.token_ids) - self.num_computed - self.num_computing
        return pending if pending > 1 else 1

    @property
    def next_start(self) -> int:
        """Where its next step begins. One that decodes has its next token known by then."""
        return self.num_computed + self.num_computing

    @property
    def is_ending(self) -> bool:
        """Whether the token under way is its last by length, so that nothing is left to compute."""
        return self.num_computing > 0 and self.next_start >= max(len(self.token_ids), self.max_len - 1)

    @property
    def is_suspect(self) -> bool:
        """Whether a rank may have died of it."""
        return self.repute is not None and self.repute.is_suspect(len(self.token_ids))


class SeqStep(msgspec.Struct, frozen=True):
    """`num_tokens` more tokens of `seq`, from position `start`, needing `num_new_blocks` more blocks.

    `hits` are cached blocks that a newly admitted sequence starts with; the blocks from there to `start` are copied
    back from the host. The last len(draft) tokens are guesses.
    """

    seq: Seq
    start: int
    num_tokens: int
    num_new_blocks: int
    hits: tuple[int, ...] = ()
    draft: tuple[int, ...] = ()


class LoadStep(msgspec.Struct, frozen=True):
    """Ask the outer tier for the blocks `keys` of a waiting `seq`; they follow its cached blocks `hits`."""

    seq: Seq
    hits: tuple[int, ...]
    keys: tuple[bytes, ...]


class Plan(msgspec.Struct, frozen=True):
    """One step: what is computed, who gives up blocks for it, what the outer tier is asked for."""

    steps: tuple[SeqStep, ...] = ()
    preempted: tuple[Seq, ...] = ()
    swapped: tuple[Seq, ...] = ()  # those of the preempted whose blocks are copied to the host
    loads: tuple[LoadStep, ...] = ()


def num_blocks_of(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // block_size)
