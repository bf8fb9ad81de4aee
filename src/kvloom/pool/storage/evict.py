"""Eviction: which block goes when room is needed, by S3-FIFO or least recently used. Pure.

S3-FIFO (Yang et al., SOSP 2023) is the default: new keys enter a small queue, and move to the main one only if they are
used again before they reach its end; so a scan of one-time blocks does not evict shared ones. Keys that leave the small
queue are remembered, and enter the main queue at once when they come back. The size of the small queue adapts to the
misses of remembered keys, as in ARC (Megiddo and Modha, FAST 2003): many writers whose blocks are read a while later
need more than a tenth (docs/decisions/pool.md).
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

_MAX_USES = 3  # further hits do not keep a key longer
_WHOLE = 1 << 32  # shares are integer multiples of 1 / it, so that C++ computes the same
_LEAST, _MOST = _WHOLE // 10, _WHOLE * 9 // 10  # smallest and largest share of the small queue
_FALL = 8  # a miss of a key that was used counts so many times as much as of one that was not
_MAX_MISSED, _MAX_RATIO, _MIN_SIZE = 64, 64, 256  # bounds how far one call moves the share
_MAX_PASSED = 4096  # keys examined for a victim, so that the time does not grow with the pool


class Order(Protocol):
    """The eviction order of a set of keys of equal cost."""

    def __len__(self) -> int: ...

    def __contains__(self, key: bytes) -> bool: ...

    def add(self, key: bytes) -> None:
        """A key that is not in yet."""

    def touch(self, key: bytes) -> None:
        """The key was used."""

    def missed(self, key: bytes, count: int) -> None:
        """A reader asked for the key, which is not in the set, and for `count` - 1 more behind it."""

    def remove(self, key: bytes) -> None:
        """The key is gone, for whatever reason; does nothing when it is not in the set."""

    def victim(self, is_kept: Callable[[bytes], bool]) -> bytes | None:
        """The key to evict, still in the set; None when all are kept. Always terminates."""

    def check(self) -> None:
        """States the invariants."""


class Lru:
    """The least recently used key goes: for loads that return to what they used last."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, key: bytes) -> None:
        assert key not in self._keys, "added twice"
        self._keys[key] = None

    def touch(self, key: bytes) -> None:
        self._keys.move_to_end(key)

    def missed(self, key: bytes, count: int) -> None:
        """Changes nothing."""

    def remove(self, key: bytes) -> None:
        self._keys.pop(key, None)

    def victim(self, is_kept: Callable[[bytes], bool]) -> bytes | None:
        return next((key for key in self._keys if not is_kept(key)), None)

    def check(self) -> None:
        """Nothing to check: a key cannot be in twice."""


class S3Fifo:
    """Keeps keys that are used again in spite of scans."""

    def __init__(self) -> None:
        # key -> uses since it entered the queue or was passed over
        self._small: OrderedDict[bytes, int] = OrderedDict()
        self._main: OrderedDict[bytes, int] = OrderedDict()
        self._ghost: OrderedDict[bytes, bool] = OrderedDict()  # keys that left the small queue -> missed since
        # keys that left the main queue and were not missed since
        self._former: OrderedDict[bytes, None] = OrderedDict()
        self._share = _LEAST  # share of the keys in the small queue

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, key: bytes) -> bool:
        return key in self._small or key in self._main

    def add(self, key: bytes) -> None:
        """Add a key that is not in the set."""
        assert key not in self._small, "added twice"
        assert key not in self._main, "added twice"
        self.missed(key, 1)
        if key in self._ghost:
            del self._ghost[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def touch(self, key: bytes) -> None:
        """The key was used."""
        queue = self._small if key in self._small else self._main
        if queue[key] < _MAX_USES:
            queue[key] += 1

    def missed(self, key: bytes, count: int) -> None:
        """Move the share towards the queue that would have kept the key; the fewer of its keys are remembered, the
        further.
        """
        num_unused, num_used = max(1, len(self._ghost)), max(1, len(self._former))
        step = min(count, _MAX_MISSED) * _WHOLE // max(_MIN_SIZE, len(self))
        if self._ghost.get(key) is False:
            self._ghost[key] = True
            self._share = min(_MOST, self._share + step * min(_MAX_RATIO, max(1, num_used // num_unused)))
        elif key in self._former:
            del self._former[key]
            step *= _FALL
            self._share = max(_LEAST, self._share - step * min(_MAX_RATIO, max(1, num_unused // num_used)))

    def remove(self, key: bytes) -> None:
        """The key is gone, for whatever reason; no-op when it is not in."""
        if self._small.pop(key, None) is not None:
            self._ghost[key] = False
            limit = max(16, len(self))
            while len(self._ghost) > limit:
                self._ghost.popitem(last=False)
        elif self._main.pop(key, None) is not None:
            self._former[key] = None
            while len(self._former) > max(16, len(self) - len(self._ghost) // 2):
                self._former.popitem(last=False)

    def victim(self, is_kept: Callable[[bytes], bool]) -> bytes | None:
        """The key to evict, still in the set; None when all are kept. Terminates, because it ages the keys that it
        passes.
        """
        small, main = self._small, self._main
        total, left = len(small) + len(main), _MAX_PASSED
        for _ in range(min(len(small), left)):
            if len(small) * _WHOLE < self._share * total:
                break  # the rest of the small queue is new: give it time to be used
            key = next(iter(small))
            if is_kept(key):
                small.move_to_end(key)
            elif small[key]:
                del small[key]
                main[key] = 0
            else:
                return key
            left -= 1
        for _ in range(min((_MAX_USES + 1) * len(main), left)):
            key = next(iter(main))
            uses = main[key]
            if not uses and not is_kept(key):
                return key
            main[key] = max(0, uses - 1)
            main.move_to_end(key)
        return next((key for keys in (main, small) for key in keys if not is_kept(key)), None)

    def check(self) -> None:
        """Assert the invariants: queues are disjoint, uses are in range, remembered keys are bounded."""
        assert not self._small.keys() & self._main.keys()
        assert not (self._ghost.keys() | self._former.keys()) & (self._small.keys() | self._main.keys())
        assert not self._ghost.keys() & self._former.keys()
        assert _LEAST <= self._share <= _MOST
        assert all(0 <= uses <= _MAX_USES for queue in (self._small, self._main) for uses in queue.values())


class Classes:
    """Orders of all size classes, separate for the tenant's own blocks and for copies of other nodes' blocks."""

    def __init__(self, new_order: Callable[[], Order]) -> None:
        self._new_order = new_order
        self._copies: dict[int, Order] = {}
        self._own: dict[int, Order] = {}

    def of(self, slot: int, is_rcache: bool) -> Order:
        """The order of blocks that take `slot` bytes of memory."""
        orders = self._copies if is_rcache else self._own
        if slot not in orders:
            orders[slot] = self._new_order()
        return orders[slot]

    def missed(self, key: bytes, count: int) -> None:
        """A reader asked for a key that is not in, and for `count` - 1 behind it."""
        for order in (*self._copies.values(), *self._own.values()):
            order.missed(key, count)

    def of_slot(self, slot: int) -> list[Order]:
        """Both orders of a class, copies first."""
        return [orders[slot] for orders in (self._copies, self._own) if slot in orders]

    def copies(self) -> list[Order]:
        """Orders of copies, the class that takes most memory first."""
        return _heaviest_first(self._copies)

    def every(self) -> list[Order]:
        """All, copies first."""
        return _heaviest_first(self._copies) + _heaviest_first(self._own)

    def check(self) -> None:
        """States the invariants."""
        for order in self.every():
            order.check()


def _heaviest_first(orders: dict[int, Order]) -> list[Order]:
    return [orders[slot] for slot in sorted(orders, key=lambda slot: (-slot * len(orders[slot]), slot))]


ORDERS: dict[str, type[S3Fifo] | type[Lru]] = {"s3fifo": S3Fifo, "lru": Lru}
"""By the name that an agent is configured with."""
