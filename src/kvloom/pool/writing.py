"""Writer: the saves of one session.

Staged: the client's bytes are copied out of its staging area into a place nobody else can write, and summed there; what
the client does to the area meanwhile can spoil its own block's content, never the match of content and checksum.
Direct (trusted node): the client writes into the reserved place itself and sends the checksum.
"""

import time
from collections import Counter

import xxhash

from ems.wire import messages as m
from ems.wire.messages import Status
from kvloom.pool.entries import Entry, Place
from kvloom.pool.node import Node
from kvloom.pool.segments import Bytes, SharedMemory
from kvloom.pool.store import TenantPool

_KEYS_AT_ONCE = 32  # of a message, between two turns of other sessions at the index
_COUNTER = [f"save_{status.name.lower()}" for status in Status]


class Writer:
    """Used by its session's thread only."""

    def __init__(self, pool: TenantPool, node: Node) -> None:
        self._pool = pool
        self._node = node
        self._limit = node.put_limit(pool.tenant)
        self._batch: list[Entry] = []  # pinned until `rest`: a batch makes room neither for itself nor for the next
        self._has_ended = False
        self._num_stored = self._largest_slot = 0  # of the batch
        self._places: list[tuple[Place, bytes]] = []  # reserved, with their parents

    def save(self, message: m.Save, arena: SharedMemory, deadline_s: float) -> m.Saved:
        """One status a key, in order. After the first key that found no room the others are not tried."""
        self._begin_batch()
        statuses = bytearray()
        keys = m.split_keys(message.keys)
        areas = [arena.data[offset : offset + n] for offset, n in zip(message.offsets, message.lengths, strict=True)]
        parents = [message.parent, *keys[:-1]]
        step = _KEYS_AT_ONCE if self._node.others is None or message.write_rcache else 1
        for start in range(0, len(keys), step):
            part = slice(start, start + step)
            if not self._may_put(sum(message.lengths[part])):
                statuses.append(Status.LIMITED)
                break
            done = self._save(keys[part], areas[part], parents[part], message.write_rcache, deadline_s)
            statuses += done
            if done[-1] > Status.CONFLICT:
                break
        for status, count in Counter(statuses).items():
            self._pool.counts[_COUNTER[status]] += count
        self._has_ended = message.is_last
        return m.Saved(bytes(statuses) + bytes(statuses[-1:]) * (len(keys) - len(statuses)))

    def _may_put(self, size: int) -> bool:
        return self._limit is None or self._limit.take(size, time.monotonic())

    def _save(
        self, keys: list[bytes], areas: list[Bytes], parents: list[bytes], write_rcache: bool, deadline_s: float
    ) -> bytearray:
        """Blocks whose home is another node are sent there now, or kept as copies that follow in the background."""
        others = self._node.others
        if others is None:
            return self._store(keys, areas, parents, [False] * len(keys))
        is_away = [not others.is_local(key) for key in keys]
        if is_away[0] and not write_rcache:
            copy = areas[0].tobytes()
            checksum = xxhash.xxh3_128_digest(copy)
            if others.push_now(self._pool.tenant, keys[0], parents[0], copy, checksum, deadline_s):
                return bytearray([Status.STORED])
            is_away[0] = False  # its home is away: better here than nowhere
        first = len(self._batch)
        statuses = self._store(keys, areas, parents, is_away)
        for i, status in enumerate(statuses):
            if is_away[i] and status == Status.STORED:
                entry = self._batch[first + i]
                self._pool.pin_again(entry)
                others.push_later(self._pool, entry, parents[i])
        return statuses

    def _store(self, keys: list[bytes], areas: list[Bytes], parents: list[bytes], is_rcache: list[bool]) -> bytearray:
        """Copies the areas to places of their own, publishes these and pins them; ends after one without room."""
        found = self._pool.begin_all(keys, [len(area) for area in areas], is_rcache)
        written = []
        for place, area, parent in zip(found, areas, parents, strict=False):
            if isinstance(place, Place):
                view = self._pool.view(place.offset, place.length)
                view[:] = area
                written.append((place, xxhash.xxh3_128_digest(view.data), parent))
        published = iter(self._publish(written))
        statuses = bytearray()
        for place, area in zip(found, areas, strict=False):
            if isinstance(place, Place):
                status, entry = next(published)
            elif isinstance(place, Entry):
                is_same = place.length == len(area) and place.checksum == xxhash.xxh3_128_digest(area.data)
                status, entry = Status.DUPLICATE if is_same else Status.CONFLICT, place
            else:
                statuses.append(place)
                break
            statuses.append(status)
            self._batch.append(entry)
        return statuses

    def reserve(self, message: m.Reserve) -> m.Reserved:
        """Places for the keys that are not here yet; reserved until the next Reserve, a Commit or the end."""
        self._begin_batch()
        self._drop_places()
        keys = m.split_keys(message.keys)
        refusal = None if self._may_put(sum(message.lengths)) else Status.LIMITED
        if not self._node.config.is_direct:
            refusal = Status.NO_ROOM
        found = [refusal] if refusal else self._pool.begin_all(keys, message.lengths, [False] * len(keys))
        statuses, segments, offsets = bytearray(), [0] * len(keys), [0] * len(keys)
        for i, (place, parent) in enumerate(zip(found, [message.parent, *keys], strict=False)):
            if isinstance(place, Place):
                self._places.append((place, parent))
                segments[i], offsets[i] = self._pool.locate(place.offset)
                statuses.append(Status.STORED)
            elif isinstance(place, Entry):
                self._batch.append(place)
                statuses.append(Status.DUPLICATE)
            else:
                statuses += bytes([place]) * (len(keys) - i)
        return m.Reserved(bytes(statuses), segments, offsets)

    def commit(self, message: m.Commit) -> m.Saved:
        """Publishes the reserved places with the checksums the client computed over what it wrote."""
        sums = m.split_sums(message.sums)
        places, self._places = self._places, []
        for place, _parent in places[len(sums) :]:
            self._pool.abandon(place)
        written = [(place, checksum, parent) for (place, parent), checksum in zip(places, sums, strict=False)]
        published = self._publish(written)
        self._batch += [entry for _status, entry in published]
        self._has_ended = True
        return m.Saved(bytes(status for status, _entry in published))

    def _publish(self, written: list[tuple[Place, bytes, bytes]]) -> list[tuple[Status, Entry]]:
        self._num_stored += len(written)
        self._largest_slot = max(self._largest_slot, *(place.slot for place, _checksum, _parent in written), 0)
        return self._pool.publish_all(written)

    def _drop_places(self) -> None:
        for place, _parent in self._places:
            self._pool.abandon(place)
        self._places = []

    def _begin_batch(self) -> None:
        if self._has_ended:
            self._end_batch()

    def _end_batch(self) -> None:
        self._pool.unpin(self._batch)
        self._batch, self._has_ended = [], False
        self._num_stored = self._largest_slot = 0

    def rest(self) -> bool:
        """Some of what can wait until a batch was answered: makes room for another of its size, then ends its pins.

        Returns whether there is more to do.
        """
        if not self._has_ended:
            return False
        if self._num_stored and self._pool.make_room_ahead(self._largest_slot, self._num_stored):
            return True
        self._end_batch()
        return False

    def close(self) -> None:
        """Gives back what the client had not finished."""
        self._drop_places()
        self._end_batch()
