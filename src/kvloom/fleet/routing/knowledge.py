"""Knowledge: which blocks of a prompt each replica's prefix cache probably holds. Pure bookkeeping of estimates.

It records which prompts were routed where, and is corrected by replicas' reports of how many blocks they have published
and evicted. A block's hash identifies its whole prefix (engine.schedule.blocks), so a chain of hashes is a path in a
trie, and a set of hashes is enough. Hashes are cut to KEY_BYTES: a collision only sends one prompt to another replica
than it would have gone to.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

KEY_BYTES = 8  # bytes of a block's hash
UNREPORTED_BLOCKS = 4096  # assumed bound of a replica's blocks until it has reported one


def keys_of(prefix: bytes) -> list[bytes]:
    """The keys of a chain, from the bytes of `packed`."""
    return [prefix[at : at + KEY_BYTES] for at in range(0, len(prefix), KEY_BYTES)]


def packed(hashes: Iterable[bytes]) -> bytes:
    """The keys of a chain of block hashes, concatenated."""
    return b"".join(key[:KEY_BYTES] for key in hashes)


@dataclass(frozen=True, slots=True)
class Report:
    """A replica's figures of its prefix cache."""

    num_blocks: int  # all its blocks
    num_cached: int  # blocks published under a hash
    total_evicted: int  # published blocks that were reused for other contents
    epoch: int = 0  # id of the cache: another id means that all blocks are gone


@dataclass(slots=True)
class _Held:
    """Keys that one replica is believed to hold, least recently used first."""

    keys: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    report: Report | None = None
    num_added: int = 0  # keys added since the last report

    def drop(self, count: int) -> None:
        for _ in range(min(count, len(self.keys))):
            self.keys.popitem(last=False)


class Knowledge:
    """Bounded: of each replica as many keys as it has blocks, of the outer pool `max_pooled`. Owned by one router."""

    def __init__(self, max_pooled: int = 1 << 20) -> None:
        self._held: dict[str, _Held] = {}
        self._pooled: OrderedDict[bytes, None] = OrderedDict()  # keys that any replica saved to the outer pool
        self._max_pooled = max_pooled

    def num_known(self, replica: str, keys: Sequence[bytes]) -> int:
        """How many of the first blocks of a prompt the replica is believed to hold."""
        held = self._held.get(replica)
        return 0 if held is None else _num_leading(keys, held.keys)

    def num_pooled(self, keys: Sequence[bytes]) -> int:
        """How many of the first blocks of a prompt the outer pool is believed to hold."""
        return _num_leading(keys, self._pooled)

    def routed(self, replica: str, keys: Sequence[bytes]) -> None:
        """The replica will compute these blocks, or has them. The end of a prompt is forgotten before its beginning."""
        held = self._held.setdefault(replica, _Held())
        before = len(held.keys)
        for key in reversed(keys):
            held.keys[key] = None
            held.keys.move_to_end(key)
        held.num_added += len(held.keys) - before
        limit = held.report.num_blocks if held.report else UNREPORTED_BLOCKS
        held.drop(len(held.keys) - limit)

    def saved(self, keys: Sequence[bytes]) -> None:
        """These blocks are saved to the outer pool."""
        for key in reversed(keys):
            self._pooled[key] = None
            self._pooled.move_to_end(key)
        while len(self._pooled) > self._max_pooled:
            self._pooled.popitem(last=False)

    def reported(self, replica: str, report: Report) -> None:
        """Correct the estimate by a report; keys routed since the last report may be missing from it."""
        held = self._held.setdefault(replica, _Held())
        before, held.report = held.report, report
        if before is not None and (before.epoch != report.epoch or report.total_evicted < before.total_evicted):
            held.keys.clear()
        elif before is not None:
            evicted = report.total_evicted - before.total_evicted
            held.drop(round(len(held.keys) * evicted / max(1, report.num_cached + evicted)))
        held.drop(len(held.keys) - min(report.num_blocks, report.num_cached + held.num_added))
        held.num_added = 0

    def keep(self, replicas: Iterable[str]) -> None:
        """Forget all other replicas."""
        wanted = set(replicas)
        self._held = {replica: held for replica, held in self._held.items() if replica in wanted}

    def num_keys(self, replica: str) -> int:
        """Blocks that the replica is believed to hold."""
        held = self._held.get(replica)
        return 0 if held is None else len(held.keys)


def _num_leading(keys: Sequence[bytes], held: OrderedDict[bytes, None]) -> int:
    for index, key in enumerate(keys):
        if key not in held:
            return index
    return len(keys)
