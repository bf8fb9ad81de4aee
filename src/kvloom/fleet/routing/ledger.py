"""Ledger: tokens assigned to each replica and not computed yet, as the router of one ingress sees it. Pure."""

from collections import Counter
from dataclasses import dataclass

STREAM_TOKENS = 16  # tokens that a decoding request adds to the wait for a first token


@dataclass(slots=True)
class _Entry:
    replica: str
    num_tokens: int


class Ledger:
    """Owned by one router. Keys are requests; unknown and ended keys are ignored."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._own: Counter[str] = Counter()
        self._others: dict[str, int] = {}  # tokens that other ingresses have assigned

    def routed(self, key: str, replica: str, num_tokens: int) -> None:
        """The replica has to compute so many tokens of its prompt."""
        self.ended(key)
        self._entries[key] = _Entry(replica, num_tokens + STREAM_TOKENS)
        self._own[replica] += num_tokens + STREAM_TOKENS

    def begun(self, key: str) -> None:
        """Its first token is there."""
        entry = self._entries.get(key)
        if entry is not None:
            self._own[entry.replica] -= entry.num_tokens - STREAM_TOKENS
            entry.num_tokens = STREAM_TOKENS

    def ended(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._own[entry.replica] -= entry.num_tokens

    def reported(self, replica: str, num_queued: int) -> None:
        """Prompt tokens that the replica reports as unanswered, whoever sent them."""
        self._others[replica] = max(0, num_queued - self._own[replica])

    def load(self, replica: str) -> int:
        """Tokens before a new prompt there."""
        return self._own[replica] + self._others.get(replica, 0)

    def keep(self, replicas: set[str]) -> None:
        """Forget all other replicas; their requests end with their streams."""
        self._others = {replica: load for replica, load in self._others.items() if replica in replicas}
