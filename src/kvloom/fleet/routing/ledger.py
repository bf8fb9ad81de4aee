"""Ledger: what each replica has been given and not done, in tokens, as the router of one ingress sees it. Pure."""

from collections import Counter
from dataclasses import dataclass

STREAM_TOKENS = 16  # what one who decodes adds to the wait for a first token


@dataclass(slots=True)
class _Entry:
    replica: str
    num_tokens: int


class Ledger:
    """Owned by one router. Keys are requests; a key that is unknown, or has ended, is ignored."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._own: Counter[str] = Counter()
        self._others: dict[str, int] = {}  # what other ingresses have given

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
        """Tokens of prompts that the replica says it has not answered yet, whoever gave them."""
        self._others[replica] = max(0, num_queued - self._own[replica])

    def load(self, replica: str) -> int:
        """Tokens before a new prompt there."""
        return self._own[replica] + self._others.get(replica, 0)

    def keep(self, replicas: set[str]) -> None:
        """Only these exist; requests of the others end when their streams do."""
        self._others = {replica: load for replica, load in self._others.items() if replica in replicas}
