"""Pinned, offered and arriving blocks of a pool, looked at one by one: for blocks that are kept in Python."""

from ems.wire.messages import SUM_BYTES, Status, split_keys, split_sums
from kvloom.pool.storage.entries import Begun, Block, NoRoom, Reservation, Written
from kvloom.pool.storage.passing import UNSOUND, Announced, Arrived, Located, Spans, Sums
from kvloom.pool.storage.pool import Pool


class HeldEntries:
    """`Held` over single blocks."""

    def __init__(self, pool: Pool, entries: list[Block]) -> None:
        self._pool = pool
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    def located(self) -> Located:
        """Where they lie."""
        found = [self._pool.locate(entry.offset) for entry in self._entries]
        return Located(
            [segment for segment, _offset in found],
            [offset for _segment, offset in found],
            [entry.length for entry in self._entries],
            b"".join(entry.checksum for entry in self._entries),
        )

    def blocks(self) -> list[Block]:
        """Each; who takes them ends their pins."""
        return self._entries

    def release(self) -> None:
        """Ends the pins."""
        self._pool.unpin(self._entries)


class EntryOffer:
    """`Offered`, pinned."""

    def __init__(self, pool: Pool, keys: list[bytes]) -> None:
        self._pool = pool
        self._entries = pool.pin_each(keys)

    @property
    def lengths(self) -> list[int]:
        """Of each key."""
        return [entry.length if entry is not None else 0 for entry in self._entries]

    @property
    def sums(self) -> bytes:
        """Of each key."""
        return b"".join(entry.checksum if entry is not None else bytes(SUM_BYTES) for entry in self._entries)

    @property
    def spans(self) -> Spans:
        """Of each key."""
        views = [self._pool.view(each.offset, each.length) if each is not None else None for each in self._entries]
        return Spans.of(views, self.lengths)

    def release(self) -> None:
        """Ends the pins."""
        self._pool.unpin([entry for entry in self._entries if entry is not None])


class EntryArrival:
    """`Arrival`, begun."""

    def __init__(self, pool: Pool, blocks: Announced) -> None:
        self._pool = pool
        self._blocks = blocks
        self._begun: list[Begun] = []
        while len(self._begun) < len(blocks.keys):  # one that finds no room does not keep out those behind it
            keys, lengths = blocks.keys[len(self._begun) :], blocks.lengths[len(self._begun) :]
            self._begun += pool.begin_all(keys, lengths, [blocks.is_rcache] * len(keys))

    @property
    def spans(self) -> Spans:
        """Where their bytes belong."""
        view = self._pool.view
        memories = [view(each.offset, each.length) if isinstance(each, Reservation) else None for each in self._begun]
        return Spans.of(memories, self._blocks.lengths)

    def settle(self, sums: Sums) -> Arrived:
        """Publishes those whose sums hold."""
        statuses, entries, unsound = bytearray(), list[Block](), list[Reservation]()
        parents = split_keys(self._blocks.parents) or [b""] * len(self._begun)
        for i, announced in enumerate(split_sums(self._blocks.sums)):
            begun, status = self._begun[i], UNSOUND
            if isinstance(begun, NoRoom):
                status = begun.status
            elif not isinstance(begun, Reservation):
                is_same = begun.checksum == announced and begun.length == self._blocks.lengths[i]
                status = Status.DUPLICATE if is_same else Status.CONFLICT
                entries.append(begun)
            elif sums[i].tobytes() != announced:
                unsound.append(begun)
            else:
                status, entry = self._pool.publish(Written(begun, announced, parents[i]))
                entries.append(entry)
            statuses.append(status)
        for reservation in unsound:
            self._pool.abandon(reservation)
        for entry in entries:
            entry.is_home = entry.is_home or self._blocks.is_rcache
        return Arrived(bytes(statuses), HeldEntries(self._pool, entries), [entry.length for entry in entries])

    def give_up(self) -> None:
        """Keeps nothing of them."""
        for each in self._begun:
            if isinstance(each, Reservation):
                self._pool.abandon(each)
        self._pool.unpin([each for each in self._begun if not isinstance(each, Reservation | NoRoom)])
