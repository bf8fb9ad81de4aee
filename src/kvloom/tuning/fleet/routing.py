"""Routing of requests to replicas: round robin, the less loaded of two, or the fleet's own choice. Pure."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvloom.fleet.routing.choice import Candidate, Rules, choose
from kvloom.fleet.routing.knowledge import Knowledge, Report, keys_of, packed
from kvloom.fleet.routing.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to be routed: `hashes` of its prompt's full blocks, and the prompt's number of tokens."""

    id: int
    hashes: Sequence[bytes]
    num_tokens: int


class Routing(Protocol):
    """Owned by one router, which calls each method once for every request, in this order."""

    def route(self, ask: Ask, up: Sequence[str]) -> str:
        """The replica for the request, one of `up`, which is not empty."""
        ...

    def begun(self, id: int) -> None:
        """The request has its first token."""
        ...

    def ended(self, id: int) -> None:
        """The request has left its replica."""
        ...


class RoundRobin:
    def __init__(self) -> None:
        self._turn = 0

    def route(self, ask: Ask, up: Sequence[str]) -> str:
        self._turn += 1
        return up[(self._turn - 1) % len(up)]

    def begun(self, id: int) -> None:
        pass

    def ended(self, id: int) -> None:
        pass


class PowerOfTwo:
    """The less loaded of two random replicas, by running requests, as in Serve's own router."""

    def __init__(self) -> None:
        self._draw = random.Random(0)
        self._where: dict[int, str] = {}
        self._num: Counter[str] = Counter()

    def route(self, ask: Ask, up: Sequence[str]) -> str:
        two = self._draw.sample(list(up), min(2, len(up)))
        chosen = min(two, key=lambda replica: self._num[replica])
        self._where[ask.id] = chosen
        self._num[chosen] += 1
        return chosen

    def begun(self, id: int) -> None:
        pass

    def ended(self, id: int) -> None:
        if (replica := self._where.pop(id, None)) is not None:
            self._num[replica] -= 1


class Prefix:
    """The fleet's own choice, by the same code: cached prefixes, queued tokens, and the guard."""

    def __init__(self, num_blocks: Mapping[str, int], block_size: int) -> None:
        """`num_blocks`: replica -> its blocks."""
        self._block_size, self._rules, self._turn = block_size, Rules(), 0
        self._knowledge, self._ledger = Knowledge(), Ledger()
        for replica, count in num_blocks.items():
            self._knowledge.reported(replica, Report(count, 0, 0))

    def route(self, ask: Ask, up: Sequence[str]) -> str:
        keys = keys_of(packed(ask.hashes))
        known = {replica: self._block_size * self._knowledge.num_known(replica, keys) for replica in up}
        candidates = [Candidate(replica, self._ledger.load(replica), known[replica]) for replica in up]
        self._turn += 1
        chosen = choose(candidates, ask.num_tokens, self._rules, self._turn)[0]
        self._ledger.routed(str(ask.id), chosen, ask.num_tokens - known[chosen])
        self._knowledge.routed(chosen, keys)
        return chosen

    def begun(self, id: int) -> None:
        self._ledger.begun(str(id))

    def ended(self, id: int) -> None:
        self._ledger.ended(str(id))


ROUTINGS: Mapping[str, Callable[[Mapping[str, int], int], Routing]] = {
    "prefix": Prefix,
    "power_of_two": lambda num_blocks, block_size: PowerOfTwo(),
    "round_robin": lambda num_blocks, block_size: RoundRobin(),
}
