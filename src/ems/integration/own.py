"""What the pool lacks of prefixes in the engine's own cache: it was down, has restarted, had no room, or evicted them.

A thread finds it out when a request uses such a prefix, and it is saved while the request runs.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from ems.integration.lookup import Lookup
from ems.integration.prefix import Kind, unit_of

KNOWN_S = 60.0  # seconds after which the pool may have lost a block
STEP_TOKENS = 2048  # of all requests, in a step: about what a step computes


class Known:
    """Names of blocks that were saved, or found in the pool, within the last minute: these are neither asked for nor
    saved again, even if there was no room for them.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s: dict[int, float] = {}  # the oldest first

    def add(self, names: Iterable[int]) -> None:
        now_s = self._clock()
        for name in names:
            self._since_s.pop(name, None)
            self._since_s[name] = now_s
        self._forget(now_s)

    def count(self, names: Sequence[int]) -> int:
        """How many of `names`, from the first on, are known."""
        self._forget(self._clock())
        return next((i for i, name in enumerate(names) if name not in self._since_s), len(names))

    def _forget(self, now_s: float) -> None:
        while self._since_s and self._since_s[oldest := next(iter(self._since_s))] <= now_s - KNOWN_S:
            del self._since_s[oldest]


@dataclass(slots=True)
class Own:
    """A request's prefix in the engine's own cache.

    names: of its blocks, for each kind; there: how many of them, from the first on, the pool has; lacking: the blocks
    that are still to be saved.
    """

    num_tokens: int = 0
    names: list[list[int]] = field(default_factory=list)
    there: "Future[list[int]] | None" = None
    lacking: list[range] = field(default_factory=list)


class OwnPrefixes:
    """Owned by the scheduler's thread."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self._kinds = kinds
        self._unit = unit_of(kinds)
        self._known = [Known() for _ in kinds]  # kinds may have blocks of the same name

    def look(
        self, own: Own, num_tokens: int, hashes: Callable[[Kind, int], list[int]], lookup: Lookup, is_promised: bool
    ) -> None:
        """Ask what the pool has of the engine's first tokens, unless that is known, once for each number of them.

        hashes: the names of a kind's first blocks. is_promised: another engine will wait for them, so what is known is
        asked for too.
        """
        num_tokens = num_tokens // self._unit * self._unit
        if own.num_tokens == num_tokens:
            return
        wanted = [kind.range_of(0, num_tokens) for kind in self._kinds]
        own.num_tokens, own.there, own.lacking = num_tokens, None, []
        own.names = [hashes(kind, some.stop)[some.start :] for kind, some in zip(self._kinds, wanted, strict=True)]
        is_known = all(self._known_of(own, kind) == len(names) for kind, names in enumerate(own.names))
        if is_promised or not is_known:
            own.there = lookup.count(own.names)

    def is_known(self, own: Own, patience_s: float) -> bool:
        """Whether it is known what the pool lacks, after at most `patience_s`."""
        if own.there is not None:
            wait([own.there], patience_s)
        return own.there is None or own.there.done()

    def take_lacking(self, own: Own, num_computed: int, num_tokens: int | None, is_promised: bool) -> list[range]:
        """For each kind, the next blocks to be saved, of at most `num_tokens` tokens (None: all of them).

        num_computed: the request's computed tokens; blocks that its next token does not see may be somebody else's.
        """
        if num_computed < own.num_tokens:
            own.there, own.lacking = None, []  # it has begun again, without them
        if own.there is not None and own.there.done():
            own.lacking = self._lacking(own, own.there.result(), is_promised)
            own.there = None
        taken = [range(0)] * len(self._kinds)
        for i, lacks in enumerate(own.lacking):
            kind = self._kinds[i]
            first = min(max(lacks.start, kind.first_needed(num_computed)), lacks.stop)
            stop = lacks.stop if num_tokens is None else min(lacks.stop, first + num_tokens // kind.block_size)
            taken[i], own.lacking[i] = range(first, stop), range(stop, lacks.stop)
        return taken

    def _lacking(self, own: Own, counts: Sequence[int], is_promised: bool) -> list[range]:
        lacking = []
        for number, (kind, count) in enumerate(zip(self._kinds, counts, strict=True)):
            names = own.names[number]
            self._known[number].add(names[:count])
            begin = count if is_promised else max(count, self._known_of(own, number))
            blocks = kind.range_of(0, own.num_tokens)
            lacking.append(blocks[begin:])
        return lacking

    def _known_of(self, own: Own, kind: int) -> int:
        return self._known[kind].count(own.names[kind])

    def saving(self, kind: int, names: Iterable[int]) -> None:
        """These blocks are being saved."""
        self._known[kind].add(names)
