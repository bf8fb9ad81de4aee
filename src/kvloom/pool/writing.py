"""Writer: the saves of one session.

Staged: the client's bytes are copied out of its staging area into a place nobody else can write, and summed there; what
the client does to the area meanwhile can spoil its own block's content, never the match of content and checksum.
Direct (trusted node): the client writes into the reserved place itself and sends the checksum.
"""

import xxhash

from ems.wire import messages as m
from ems.wire.messages import Status
from kvloom.pool.node import Node
from kvloom.pool.segments import Bytes, SharedMemory
from kvloom.pool.store import Entry, Place, TenantPool

_COUNTER = {status: f"save_{status.name.lower()}" for status in Status}


class Writer:
    """Used by its session's thread only."""

    def __init__(self, pool: TenantPool, node: Node) -> None:
        self._pool = pool
        self._node = node
        self._batch: list[Entry] = []  # pinned until the batch ends: a batch does not make room for itself
        self._places: list[tuple[Place, bytes]] = []  # reserved, with their parents

    def save(self, message: m.Save, arena: SharedMemory, deadline_s: float) -> m.Saved:
        """One status a key, in order. After the first key that found no room the others are not tried."""
        statuses = bytearray()
        parent = message.parent
        keys = m.split_keys(message.keys)
        for key, offset, length in zip(keys, message.offsets, message.lengths, strict=True):
            data = arena.data[offset : offset + length]
            status = self._save_one(key, data, parent, message.write_rcache, deadline_s)
            self._pool.counts[_COUNTER[status]] += 1
            statuses.append(status)
            if not status.is_success:
                statuses += bytes([status]) * (len(keys) - len(statuses))
                break
            parent = key
        if message.is_last:
            self._end_batch()
        return m.Saved(bytes(statuses))

    def _save_one(self, key: bytes, data: Bytes, parent: bytes, write_rcache: bool, deadline_s: float) -> Status:
        others = self._node.others
        is_home = others is None or others.is_local(key)
        if not is_home and not write_rcache and others is not None:
            copy = data.tobytes()
            if others.push_now(self._pool.tenant, key, parent, copy, xxhash.xxh3_128_digest(copy), deadline_s):
                return Status.STORED
            is_home = True  # its home is away: better here than nowhere
        status, entry = self._store(key, data, parent, is_rcache=not is_home)
        if entry is not None:
            self._batch.append(entry)
            if not is_home and others is not None and status == Status.STORED:
                self._pool.pin_again(entry)
                others.push_later(self._pool, entry, parent)
        return status

    def _store(self, key: bytes, data: Bytes, parent: bytes, is_rcache: bool) -> tuple[Status, Entry | None]:
        place = self._pool.begin(key, len(data), is_rcache)
        if isinstance(place, Status):
            return place, None
        if isinstance(place, Entry):
            is_same = place.length == len(data) and place.checksum == xxhash.xxh3_128_digest(data.data)
            return (Status.DUPLICATE if is_same else Status.CONFLICT), place
        view = self._pool.view(place.offset, place.length)
        view[:] = data
        return self._pool.publish(place, xxhash.xxh3_128_digest(view.data), parent)

    def reserve(self, message: m.Reserve) -> m.Reserved:
        """Places for the keys that are not here yet; reserved until the next Reserve, a Commit or the end."""
        self._drop_places()
        statuses, segments, offsets = bytearray(), [], []
        parent = message.parent
        for key, length in zip(m.split_keys(message.keys), message.lengths, strict=True):
            place = self._pool.begin(key, length) if self._node.config.is_direct else Status.NO_ROOM
            segment = offset = 0
            if isinstance(place, Place):
                self._places.append((place, parent))
                segment, offset = self._pool.locate(place.offset)
                statuses.append(Status.STORED)
            elif isinstance(place, Entry):
                self._batch.append(place)
                statuses.append(Status.DUPLICATE)
            else:
                statuses.append(place)
            segments.append(segment)
            offsets.append(offset)
            parent = key
        return m.Reserved(bytes(statuses), segments, offsets)

    def commit(self, message: m.Commit) -> m.Saved:
        """Publishes the reserved places with the checksums the client computed over what it wrote."""
        statuses = bytearray()
        sums = m.split_sums(message.sums)
        places, self._places = self._places, []
        for index, (place, parent) in enumerate(places):
            if index < len(sums):
                status, entry = self._pool.publish(place, sums[index], parent)
                self._batch.append(entry)
                statuses.append(status)
            else:
                self._pool.abandon(place)
        self._end_batch()
        return m.Saved(bytes(statuses))

    def _drop_places(self) -> None:
        for place, _parent in self._places:
            self._pool.abandon(place)
        self._places = []

    def _end_batch(self) -> None:
        self._pool.unpin(self._batch)
        self._batch = []

    def close(self) -> None:
        """Gives back what the client had not finished."""
        self._drop_places()
        self._end_batch()
