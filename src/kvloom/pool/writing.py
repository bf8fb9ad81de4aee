"""Writer: the saves of one session.

Staged: the client's bytes are copied from its staging area into memory that it cannot write, and summed there. If the
client changes the area meanwhile, its own block has wrong contents, but contents and checksum still match. Direct
(trusted node): the client writes into the reserved memory itself and sends the checksum.
"""

import time
from collections import Counter
from collections.abc import Callable

import xxhash

from ems.runs import Areas, Bytes
from ems.wire import messages as m
from ems.wire.messages import Status
from kvloom.pool.answering import answers
from kvloom.pool.node import Node, Others, Outgoing, Route
from kvloom.pool.storage.allocator import slot_bytes
from kvloom.pool.storage.budget import Refusal
from kvloom.pool.storage.counts import Denial
from kvloom.pool.storage.entries import Begun, Block, NoRoom, Reservation, Written
from kvloom.pool.storage.passing import Held
from kvloom.pool.storage.pool import Batch, Homes, Pool, Refused, Saved
from kvloom.pool.storage.segments import SharedMemory

_PUSH_SHARE = 0.5  # share of a batch's time to wait until its blocks can be sent home
_PAUSE_S = 0.002  # seconds between two checks whether a block has reached its home
_KEYS_AT_ONCE = 64  # of a message, between two turns of other sessions at the index
_COUNTER = [f"save_{status.name.lower()}" for status in Status]


class NodeHomes:
    """Implements `kvloom.pool.storage.pool.Homes` with the other nodes, or the store, of this one."""

    def __init__(self, pool: Pool, others: Others) -> None:
        self._pool = pool
        self._others = others

    def routes(self, keys: list[bytes]) -> bytes:
        """A `Route` for each new block."""
        return bytes(map(self._others.route, keys))

    def send_now(self, key: bytes, data: Bytes, parent: bytes, deadline_s: float) -> bool:
        """Sends a block home. Returns whether it arrived. The data may change at any time: a copy is sent."""
        copy = data.copy()
        block = Outgoing(key, copy, xxhash.xxh3_128_digest(copy.data), parent)
        return self._others.push_now(self._pool.tenant, block, deadline_s)

    def send_later(self, blocks: list[Block], parents: list[bytes], deadline_s: float) -> bytes:
        """Sends blocks home in the background, and takes over a pin of each. Returns 1 for each that will be sent."""
        return bytes(
            self._others.push_later(self._pool, block, parent, deadline_s)
            for block, parent in zip(blocks, parents, strict=True)
        )


class Writer:
    """Used by its session's thread only."""

    def __init__(self, pool: Pool, node: Node, staged: Callable[[m.Save], SharedMemory], homes: Homes | None) -> None:
        """staged: the staging area that has the blocks of a save, or raises. homes: None = no other nodes."""
        self._pool = pool
        self._node = node
        self._staged = staged
        self._homes = homes
        self._limit = node.put_limit(pool.tenant)
        # pinned until `rest`: blocks of a batch evict neither each other nor those of the next
        self._held: list[Held] = []
        self._batch: list[Block] = []  # likewise, one by one: being sent home, or reserved
        self._has_ended = False
        self._refused: Status | None = None  # of the batch's first block that was not saved
        # deadline of the batch for waiting until earlier blocks are sent home
        self._push_deadline_s: float | None = None
        self._num_stored = self._largest_slot = 0  # of the batch
        self._reserved: list[tuple[Reservation, bytes]] = []  # and their parents

    @answers(m.Save)
    def save(self, message: m.Save, deadline_s: float) -> m.Saved:
        """One status a key, in order. Keys behind one that found no room are not tried, nor are those of the batch's
        next messages, which the client may have sent already.
        """
        arena = self._staged(message)
        self._begin_batch()
        if self._refused is not None:
            self._has_ended = message.is_last
            return m.Saved(bytes([self._refused]) * len(message.lengths))
        if self._push_deadline_s is None:
            now_s = time.monotonic()
            self._push_deadline_s = now_s + (deadline_s - now_s) * _PUSH_SHARE
        statuses = bytearray()
        keys = m.split_keys(message.keys)
        areas = Areas({0: arena.data}, [0] * len(keys), message.offsets, message.lengths)
        parents = [message.parent, *keys] if message.is_chain else [None] * len(keys)
        step = _KEYS_AT_ONCE if self._homes is None or message.write_rcache else 1
        for start in range(0, len(keys), step):
            part = slice(start, start + step)
            if not self.may_put(sum(message.lengths[part])):
                statuses.append(Status.LIMITED)
                break
            done, refused = self._save(keys[part], areas[part], parents[start], message.write_rcache)
            while done[-1] == Status.NO_ROOM and self._release_sent(self._push_deadline_s):
                rest = slice(start + len(done) - 1, part.stop)
                done[-1:], refused = self._save(keys[rest], areas[rest], parents[rest.start], message.write_rcache)
            for key, cause in refused:
                self._pool.count_refused(key, cause)
            statuses += done
            if not Status(done[-1]).is_success:
                break
        self._count(statuses)
        self._has_ended = message.is_last
        if statuses and not Status(statuses[-1]).is_success:
            self._refused = Status(statuses[-1])
        return m.Saved(bytes(statuses) + bytes(statuses[-1:]) * (len(keys) - len(statuses)))

    def _count(self, statuses: bytes | bytearray) -> None:
        """Count the results of the blocks that were tried."""
        for status, count in Counter(statuses).items():
            self._pool.counts.add(_COUNTER[status], count)

    def may_put(self, num_bytes: int) -> bool:
        """Whether the tenant's rate allows so many bytes now; counts a refusal."""
        is_allowed = self._limit is None or self._limit.take(num_bytes, time.monotonic())
        if not is_allowed:
            self._pool.counts.add(f"refused_{Refusal.RATE}")
        return is_allowed

    def _save(
        self, keys: list[bytes], areas: Areas, parent: bytes | None, write_rcache: bool
    ) -> tuple[bytearray, list[Refused]]:
        """A status for each key up to the first without room, and why that found none, which is not counted yet.

        Blocks whose home is another node are sent there now, or kept as copies and sent in the background. Those that
        the home will not have, because it is unreachable or too many wait to be sent, are LOCAL. Waiting for other
        nodes ends at the batch's deadline for that.
        """
        homes = self._homes
        if homes is None:
            saved = self._store(Batch(keys, areas, parent, [False] * len(keys)))
            self._held.append(saved.held)
            return saved.statuses, saved.refused
        assert self._push_deadline_s is not None, "a batch has begun"
        routes = bytearray(homes.routes(keys))
        if routes[0] == Route.AWAY and not write_rcache:
            if homes.send_now(keys[0], areas[0], parent or b"", self._push_deadline_s):
                return bytearray([Status.STORED]), []
            routes[0] = Route.CUT_OFF  # better stored here than nowhere
        saved = self._store(Batch(keys, areas, parent, [route == Route.AWAY for route in routes]))
        statuses, entries = saved.statuses, saved.held.blocks()
        self._batch += entries
        away = [i for i in range(len(entries)) if routes[i] == Route.AWAY]
        for i in away:
            self._pool.pin_again(entries[i])
        parents = [keys[i - 1] if i and parent is not None else parent or b"" for i in away]
        sent = homes.send_later([entries[i] for i in away], parents, self._push_deadline_s)
        is_sent = dict(zip(away, sent, strict=True))
        for i in range(len(entries)):
            if routes[i] == Route.CUT_OFF or not is_sent.get(i, True):
                statuses[i] = Status.LOCAL
        return statuses, saved.refused

    def _store(self, batch: Batch) -> Saved:
        saved = self._pool.save(batch)
        self._num_stored += saved.num_stored
        self._largest_slot = max(self._largest_slot, slot_bytes(max(batch.areas.lengths)) if saved.num_stored else 0)
        return saved

    def _release_sent(self, deadline_s: float) -> bool:
        """End the pins of the batch's copies that have reached their home; wait for one, until the deadline.

        So a batch may be larger than this node's pool. False when none has, and none is on its way.
        """
        while True:
            sent = [entry for entry in self._batch if entry.is_rcache and entry.is_home]
            if sent:
                self._batch = [entry for entry in self._batch if not (entry.is_rcache and entry.is_home)]
                self._pool.unpin(sent)
                return True
            is_one_coming = any(entry.is_rcache and entry.pins > 1 for entry in self._batch)
            if not is_one_coming or time.monotonic() > deadline_s:
                return False
            time.sleep(_PAUSE_S)

    @answers(m.Reserve)
    def reserve(self, message: m.Reserve, _deadline_s: float) -> m.Reserved:
        """Memory for the keys that are not here; it is the client's until the next Reserve, a Commit or the end of the
        session.
        """
        self._begin_batch()
        self._drop_reserved()
        keys = m.split_keys(message.keys)
        found: list[Begun]
        if not self._node.config.is_direct:
            self._pool.counts.add(Denial.NOT_DIRECT.counter)
            return m.Reserved(bytes([Status.NO_ROOM]) * len(keys), [0] * len(keys), [0] * len(keys))
        if self.may_put(sum(message.lengths)):
            found = self._pool.begin_all(keys, message.lengths, [False] * len(keys))
        else:
            found = [NoRoom(Status.LIMITED)]
        statuses, segments, offsets = bytearray(), [0] * len(keys), [0] * len(keys)
        for i, (begun, parent) in enumerate(zip(found, [message.parent, *keys], strict=False)):
            if isinstance(begun, Reservation):
                self._reserved.append((begun, parent))
                segments[i], offsets[i] = self._pool.locate(begun.offset)
                statuses.append(Status.STORED)
            elif isinstance(begun, NoRoom):
                statuses += bytes([begun.status]) * (len(keys) - i)
            else:
                self._batch.append(begun)
                statuses.append(Status.DUPLICATE)
        self._count(bytes(status for status in statuses[: len(found)] if status != Status.STORED))
        return m.Reserved(bytes(statuses), segments, offsets, self._pool.num_given_back)

    @answers(m.Commit)
    def commit(self, message: m.Commit, _deadline_s: float) -> m.Saved:
        """Publish reserved blocks with the checksums that the client has computed."""
        sums = m.split_sums(message.sums)
        reserved, self._reserved = self._reserved, []
        for reservation, _parent in reserved[len(sums) :]:
            self._pool.abandon(reservation)
        written = [Written(one, s, parent) for (one, parent), s in zip(reserved, sums, strict=False)]
        self._num_stored += len(written)
        self._largest_slot = max(self._largest_slot, *(each.reservation.slot for each in written), 0)
        published = self._pool.publish_all(written)
        self._batch += [entry for _status, entry in published]
        self._has_ended = True
        statuses = bytes(status for status, _entry in published)
        self._count(statuses)
        return m.Saved(statuses)

    def _drop_reserved(self) -> None:
        for reservation, _parent in self._reserved:
            self._pool.abandon(reservation)
        self._reserved = []

    def _begin_batch(self) -> None:
        if self._has_ended:
            self._end_batch()

    def _end_batch(self) -> None:
        for held in self._held:
            held.release()
        self._pool.unpin(self._batch)
        self._held, self._batch, self._has_ended, self._push_deadline_s = [], [], False, None
        self._refused = None
        self._num_stored = self._largest_slot = 0

    def rest(self) -> bool:
        """Some of the work that can wait until a batch is answered: make room for another of its size, then end its
        pins.

        Returns whether there is more to do.
        """
        if not self._has_ended:
            return False
        if self._num_stored and self._pool.make_room_ahead(self._largest_slot, self._num_stored):
            return True
        self._end_batch()
        return False

    def close(self) -> None:
        """Free what the client has not finished."""
        self._drop_reserved()
        self._end_batch()
