"""Placement: which node is a block's home, and when a node is left alone. Pure.

Rendezvous hashing (Thaler and Ravishankar 1998): each node draws a number for each key and the highest has it. A node
that joins takes over its share of the keys, 1/n, and no more; a node that leaves gives its share to all the others.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

_FAILURES = 2  # in a row open the breaker
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 30.0


def home(key: bytes, node_ids: Iterable[str]) -> str:
    """The id of the key's home among `node_ids`, of which there must be one at least."""
    return max(node_ids, key=lambda node_id: (_draw(key, node_id), node_id))


def _draw(key: bytes, node_id: str) -> bytes:
    return hashlib.blake2b(key + node_id.encode(), digest_size=8).digest()


@dataclass(slots=True)
class Breaker:
    """Keeps calls away from a node that fails: after two failures in a row it is left alone, each time for longer.

    When the pause is over one call may try; its outcome closes the breaker or doubles the pause. Times in seconds of
    the caller's clock.
    """

    failures: int = 0
    open_until_s: float = 0.0

    def allows(self, now_s: float) -> bool:
        """Whether to call now. In a pause's end it says yes once, and no until the outcome is reported."""
        if self.failures < _FAILURES:
            return True
        if now_s < self.open_until_s:
            return False
        self.open_until_s = now_s + _MAX_PAUSE_S
        return True

    def is_open(self, now_s: float) -> bool:
        """Whether the node is being left alone; changes nothing."""
        return self.failures >= _FAILURES and now_s < self.open_until_s

    def succeed(self) -> None:
        self.failures = 0
        self.open_until_s = 0.0

    def fail(self, now_s: float) -> None:
        self.failures += 1
        if self.failures >= _FAILURES:
            pause_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(16, self.failures - _FAILURES))
            self.open_until_s = now_s + pause_s
