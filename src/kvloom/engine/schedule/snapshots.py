"""Snapshots: states of sequences that others may begin with, found by the tokens before them. Pure bookkeeping.

A snapshot is attached to the block that holds its last token, and is forgotten with it. So a prefix is good for every
layer where its full blocks are known, and a snapshot lies behind them. A full pool gives up the one that is worth
least: the tokens that it saves beside the next shorter one, times a weight for what is likely to be asked for, aged as
in GreedyDual-Size (Cao and Irani 1997). All snapshots of a model have one size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvloom.engine.schedule.known import KnownTokens, num_common
from kvloom.engine.schedule.places import Places

Key = TypeVar("Key")
MOST_BACK = 15  # tokens
_PASSED = 0.25  # weight of one that has a single successor: its conversation has gone past it


@dataclass(slots=True, eq=False)
class Snapshot:
    """A state behind `position` tokens."""

    position: int
    parent: bytes  # hash of the full blocks before the block that holds the last of them
    tail: tuple[int, ...]  # tokens of that block up to there: 1 to a block's
    block: int
    place: int  # of the state
    base: "Snapshot | None"  # the longest one of its own prefix when it was taken
    is_lasting: bool = False  # see Mark
    clock: float = 0.0
    num_longer: int = 0  # snapshots that were taken behind this one
    is_forgotten: bool = False


def known_base(snapshot: Snapshot | None) -> Snapshot | None:
    """The snapshot, or the longest of its prefix that is not forgotten."""
    while snapshot is not None and snapshot.is_forgotten:
        snapshot = snapshot.base
    return snapshot


class Snapshots:
    """At most `most` snapshots, those on their way included. Owned by the block pool. `known`: tokens of its blocks."""

    def __init__(self, num_states: int = 0, most: int = 0, block_size: int = 0, state_host_blocks: int = 0) -> None:
        """`num_states`: sequences that may run at once, each with a state; block_size in tokens; state_host_blocks: of
        RankInfo.
        """
        self.num_states, self.most, self.block_size = num_states, most, block_size
        self.state_host_blocks = state_host_blocks
        self.places = Places(num_states + most)
        self._behind: dict[bytes, list[Snapshot]] = {}  # by parent
        self._on: dict[int, list[Snapshot]] = {}  # by block
        self.known = KnownTokens()
        self._clock = 0.0
        self.back = 0  # tokens before the ends of prompts at which later ones leave them, as far as is known
        self.count = 0
        self.num_coming = 0  # that make_room() has let in and add() or give_up() not settled
        self.num_evicted = 0
        self._fresh: list[Snapshot] = []  # lasting ones, see take_fresh

    def __iter__(self) -> Iterator[Snapshot]:
        for snapshots in self._on.values():
            yield from snapshots

    def take_fresh(self) -> list[Snapshot]:
        """The lasting ones that were added since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def is_attached(self, block: int) -> bool:
        """Whether a snapshot ends in the block."""
        return block in self._on

    def find(self, parent: bytes, tokens: Sequence[int], least: int = 1) -> Snapshot | None:
        """The one behind `parent` with the longest tail, of at least `least` tokens, that begins `tokens`."""
        fitting = (
            each
            for each in self._behind.get(parent, ())
            if least <= len(each.tail) <= len(tokens) and each.tail == tuple(tokens[: len(each.tail)])
        )
        return max(fitting, key=lambda each: len(each.tail), default=None)

    def num_known(self, parent: bytes, tokens: Sequence[int]) -> int:
        """How many of `tokens` a cached block behind `parent`, or a snapshot there, begins with."""
        _, num_cached = self.known.find(parent, tokens)
        return max([num_cached, *(num_common(tokens, each.tail) for each in self._behind.get(parent, ()))])

    def num_passed(
        self, parent: bytes, tokens: Sequence[int], num_known: int, key_of: Callable[[int], bytes | None]
    ) -> int:
        """How far behind `num_known` of `tokens`, where a prompt leaves those that are known, their nearest snapshot
        is; 0 = there is none within MOST_BACK. `key_of`: the hash of a cached block.
        """
        begun = tuple(tokens[:num_known])
        found = [len(each.tail) for each in self._behind.get(parent, ()) if each.tail[:num_known] == begun]
        for block, known in self.known.behind(parent):
            key = key_of(block)
            if known[:num_known] == begun and key is not None:
                found += [len(known) + len(each.tail) for each in self._behind.get(key, ())]
        return min((end - num_known for end in found if 0 < end - num_known <= MOST_BACK), default=0)

    def forget(self, block: int) -> None:
        """The block's contents are not known any more."""
        for snapshot in self._on.get(block, [])[:]:
            self._drop(snapshot)
        self.known.forget(block)

    def touch(self, snapshot: Snapshot) -> None:
        """A sequence begins with it."""
        snapshot.clock = self._clock

    def make_room(self, position: int, base: Snapshot | None, is_wanted: bool = False) -> bool:
        """Let one more in, behind `position` tokens, whose place the caller has or takes. False if it is worth less
        than all others, and no request waits for it (`is_wanted`); these age by it.
        """
        if self.count + self.num_coming >= self.most:
            base = known_base(base)
            saved = position - (base.position if base else 0)
            least = min(self, key=self._worth, default=None)
            if least is None or (self._worth(least) > self._clock + saved and not is_wanted):
                self._clock += saved / self.most
                return False
            self._clock = max(self._clock, self._worth(least))
            self.num_evicted += 1
            self._drop(least)
        self.num_coming += 1
        return True

    def give_up(self, place: int) -> None:
        """One that was let in is not taken after all."""
        self.num_coming -= 1
        self.places.release([place])

    def add(self, snapshot: Snapshot) -> Snapshot:
        """Add one that was let in. Returns the one that is found from now on: an equal one may be there."""
        for each in self._behind.get(snapshot.parent, ()):
            if each.tail == snapshot.tail:
                self.give_up(snapshot.place)
                self.touch(each)
                return each
        self.num_coming -= 1
        snapshot.base, snapshot.clock = known_base(snapshot.base), self._clock
        if snapshot.base is not None:
            snapshot.base.num_longer += 1
        self._behind.setdefault(snapshot.parent, []).append(snapshot)
        self._on.setdefault(snapshot.block, []).append(snapshot)
        self.count += 1
        if snapshot.is_lasting:
            self._fresh.append(snapshot)
        return snapshot

    def check(self, coming: Sequence[int]) -> None:
        """Assert the invariants. `coming`: places of those on their way."""
        assert self.num_coming == len(coming)
        assert self.count + self.num_coming <= self.most or not self.most
        behind = [each for snapshots in self._behind.values() for each in snapshots]
        assert {id(each) for each in behind} == {id(each) for each in self}
        assert self.count == len(behind)
        assert all(self._on.values()), "a block is listed without a snapshot"
        assert len({(each.parent, each.tail) for each in behind}) == len(behind), "two snapshots of one prefix"
        assert not any(each.is_forgotten for each in behind)

    def _worth(self, snapshot: Snapshot) -> float:
        base = known_base(snapshot.base)
        weight = _PASSED if snapshot.num_longer == 1 else 1.0
        return snapshot.clock + weight * (snapshot.position - (base.position if base else 0))

    def _drop(self, snapshot: Snapshot) -> None:
        base = known_base(snapshot.base)
        snapshot.is_forgotten = True
        if base is not None:
            base.num_longer += snapshot.num_longer - 1
        _remove(self._behind, snapshot.parent, snapshot)
        _remove(self._on, snapshot.block, snapshot)
        self.count -= 1
        self.places.release([snapshot.place])


def _remove(index: dict[Key, list[Snapshot]], key: Key, snapshot: Snapshot) -> None:
    index[key].remove(snapshot)
    if not index[key]:
        del index[key]
