"""Picker: loads of one session that ask for independent keys, as stores of values do; a missing key does not end
them.
"""

import time

from ems.wire import messages as m
from ems.wire.messages import Cause
from kvloom.pool.answering import answers
from kvloom.pool.node import Node
from kvloom.pool.reading import PEER_SHARE, Reader
from kvloom.pool.storage.entrywise import HeldEntries
from kvloom.pool.storage.pool import Pool


class Picker:
    """Used by its session's thread only. Shares the reader's leases."""

    def __init__(self, pool: Pool, node: Node, reader: Reader) -> None:
        self._pool = pool
        self._node = node
        self._reader = reader

    @answers(m.Pick)
    def pick(self, message: m.Pick, deadline_s: float) -> m.Found:
        """Blocks of the keys that are here or arrive from other nodes in time; pinned under one lease."""
        keys = m.split_keys(message.keys)
        entries = self._pool.pin_each(keys)
        cause = Cause.NONE
        missing = list(dict.fromkeys(key for key, entry in zip(keys, entries, strict=True) if entry is None))
        if missing:
            cause = self._pool.missed(missing[0], 1)
            if not message.read_local_only and self._node.others is not None:
                now_s = time.monotonic()
                fetched = self._reader.fetch(missing, now_s + (deadline_s - now_s) * PEER_SHARE)
                cause = fetched.problem or cause
                came = iter(self._pool.pin_each([key for key, e in zip(keys, entries, strict=True) if e is None]))
                entries = [next(came) if entry is None else entry for entry in entries]
                fetched.release()
        found = [entry for entry in entries if entry is not None]
        self._reader.count(len(keys), len(found), cause)
        lease = self._reader.lend([HeldEntries(self._pool, found)])
        if not lease:
            entries = [None] * len(keys)
        located = [self._pool.locate(entry.offset) if entry else (0, 0) for entry in entries]
        return m.Found(
            lease=lease,
            segments=[segment for segment, _offset in located],
            offsets=[offset for _segment, offset in located],
            lengths=[entry.length if entry else 0 for entry in entries],
            sums=b"".join(entry.checksum if entry else bytes(m.SUM_BYTES) for entry in entries),
            cause=cause,
            num_given_back=self._pool.num_given_back,
        )

    @answers(m.Has)
    def has(self, message: m.Has, deadline_s: float) -> m.Present:
        """Which of the keys `pick` would find."""
        keys = m.split_keys(message.keys)
        asked = list(dict.fromkeys(self._pool.missing(keys)))
        missing = set(asked)
        if asked and not message.read_local_only and self._node.others is not None:
            now_s = time.monotonic()
            found = self._node.others.has(self._pool.tenant, asked, now_s + (deadline_s - now_s) * PEER_SHARE)
            missing -= {key for key, has in zip(asked, found, strict=True) if has}
        return m.Present(bytes(key not in missing for key in keys))
