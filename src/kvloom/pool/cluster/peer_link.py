"""PeerLink: this node's calls to one other node: lines for loads, one for pushes, a breaker, a queue of pushes."""

import contextlib
import queue
import threading
import time
from dataclasses import dataclass
from itertools import compress

from ems.common.breaker import Breaker
from ems.common.channel import Channel, remaining_ms
from ems.keys import KEY_BYTES
from ems.wire import messages as m
from ems.wire.frames import WireError
from ems.wire.messages import Cause, Status
from kvloom.pool.cluster.block_stream import send_blocks
from kvloom.pool.cluster.fetching import Fetch
from kvloom.pool.cluster.peer_line import Own, PeerLine, ask
from kvloom.pool.cluster.secured import Complaints
from kvloom.pool.config import Address
from kvloom.pool.node import Outgoing
from kvloom.pool.storage.entries import Block
from kvloom.pool.storage.passing import Spans
from kvloom.pool.storage.pool import Pool
from kvloom.pool.storage.seals import sealed

_PUSH_S = 5.0
_PAUSE_S = 0.001  # seconds between two turns of a load at a connection that others wait for
_MAX_QUEUE = 256  # most blocks waiting to be pushed; further pushes wait
_PUSH_BLOCKS = 32  # blocks in one message
_PUSH_BYTES = 4 << 20  # bytes in one message, without the last block


@dataclass(frozen=True, slots=True)
class _Push:
    pool: Pool
    entry: Block
    parent: bytes

    def outgoing(self) -> Outgoing:
        entry = self.entry
        return Outgoing(entry.key, self.pool.view(entry.offset, entry.length), entry.checksum, self.parent)


class PeerLink:
    """May be called from any thread. Never raises for errors of the other machine or of the network."""

    def __init__(self, own: Own, address: Address) -> None:
        self.address = address
        self.breaker = Breaker()
        complaints = Complaints()
        self._loads = [PeerLine(address, own, self.breaker, complaints) for _ in range(own.num_lines)]
        self._saves = PeerLine(address, own, self.breaker, complaints)
        self._pushes: queue.Queue[_Push | None] = queue.Queue(_MAX_QUEUE)
        self._is_closed = False
        self._thread = threading.Thread(target=self._push_all, name="ems-push", daemon=True)
        self._thread.start()

    def num_lines(self, fetch: Fetch) -> int:
        """On how many lines it is worth running this fetch at once."""
        return min(fetch.num_parts, len(self._loads))

    def get(self, fetch: Fetch, line: int, deadline_s: float) -> Cause:
        """Fetch blocks over one of the lines. Returns TIMEOUT, PEER_DOWN, CORRUPT or NO_ROOM, or NONE."""
        problem = one = Cause.NONE
        while fetch.num_parts and one not in (Cause.TIMEOUT, Cause.PEER_DOWN):
            one = self._loads[line].call(deadline_s, lambda channel: fetch.run(channel, deadline_s))
            problem = one or problem
            if self._loads[line].num_waiting:
                time.sleep(_PAUSE_S)  # otherwise this thread would take the next turn too
        return problem

    def has(self, tenant: str, keys: list[bytes], deadline_s: float) -> list[bool]:
        """For each key whether the peer has it; all False when it does not answer."""
        return self._has(self._loads[0], tenant, keys, deadline_s)

    @staticmethod
    def _has(line: PeerLine, tenant: str, keys: list[bytes], deadline_s: float) -> list[bool]:
        found: list[bool] = [False] * len(keys)

        def ask_for(channel: Channel) -> Cause:
            answer = ask(channel, m.PeerGet(tenant, b"".join(keys), has_only=True), deadline_s)
            if not isinstance(answer, m.PeerBlocks) or len(answer.lengths) != len(keys):
                raise WireError("expected blocks")
            found[:] = [length > 0 for length in answer.lengths]
            return Cause.NONE

        line.call(deadline_s, ask_for)
        return found

    def put(self, tenant: str, blocks: list[Outgoing], deadline_s: float) -> list[bool]:
        """Store blocks on the peer. Returns for each whether it has it now."""
        statuses, lengths = b"", [len(block.data) for block in blocks]
        spans = Spans.of([block.data for block in blocks], lengths)
        keys, sums = b"".join(block.key for block in blocks), b"".join(block.checksum for block in blocks)

        def send(channel: Channel) -> Cause:
            nonlocal statuses
            message = m.PeerPut(
                tenant,
                keys,
                lengths,
                sums,
                blocks[0].parent,
                b"".join(block.parent or bytes(KEY_BYTES) for block in blocks),
                sealed(keys, sums),
            )
            channel.send(message, deadline_s, deadline_ms=remaining_ms(deadline_s))
            send_blocks(channel, spans, deadline_s)
            answer = channel.receive(deadline_s).message
            if not isinstance(answer, m.Saved):
                raise WireError("expected the result of a save")
            statuses = answer.statuses
            return Cause.NONE

        if self._saves.call(deadline_s, send) or len(statuses) != len(blocks):
            return [False] * len(blocks)
        return [Status(status).is_success for status in statuses]

    def push_later(self, pool: Pool, entry: Block, parent: bytes, deadline_s: float) -> bool:
        """Queue a pinned block for the peer, waiting for room until the deadline. False when there was none, or when
        the peer is known to accept no block of its size.

        Takes over the pin, which ends when the block was sent or given up.
        """
        known = max(line.max_block_bytes for line in (self._saves, *self._loads))
        try:
            self._pushes.put(_Push(pool, entry, parent), timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Full:
            pool.counts.add("push_dropped")
            pool.unpin([entry])
            return False
        if self._is_closed:
            self._drain()
        return not known or entry.length <= known

    def _push_all(self) -> None:
        push = self._pushes.get()
        while push is not None and not self._is_closed:
            batch, size, following = [push], push.entry.length, None
            while len(batch) < _PUSH_BLOCKS and size < _PUSH_BYTES:
                try:
                    following = self._pushes.get_nowait()
                except queue.Empty:
                    break
                if following is None or following.pool is not push.pool:
                    break
                batch.append(following)
                size += following.entry.length
                following = None
            self._push(batch)
            for _ in batch:
                self._pushes.task_done()
            push = following or (None if self._is_closed else self._pushes.get())
        if push is not None:
            self._give_up(push)
        self._drain()

    def _drain(self) -> None:
        """Give up all waiting blocks."""
        with contextlib.suppress(queue.Empty):
            while True:
                push = self._pushes.get_nowait()
                if push is not None:
                    self._give_up(push)

    def _give_up(self, push: _Push) -> None:
        push.pool.counts.add("push_failed")
        push.pool.unpin([push.entry])
        self._pushes.task_done()

    def _push(self, batch: list[_Push]) -> None:
        """Send blocks of one tenant to their home, and end their pins. The home may have evicted known blocks, so it is
        asked first.
        """
        pool, deadline_s = batch[0].pool, time.monotonic() + _PUSH_S
        known = [each.entry.key for each in batch if each.entry.is_home]
        has = self._has(self._saves, pool.tenant, known, deadline_s) if known else []
        there = set(compress(known, has))
        missing = [each for each in batch if each.entry.key not in there]
        sent = self.put(pool.tenant, [each.outgoing() for each in missing], deadline_s) if missing else []
        for each, is_done in zip(missing, sent, strict=True):
            each.entry.is_home = is_done
            pool.counts.add("push_done" if is_done else "push_failed")
        pool.unpin([each.entry for each in batch])

    def end_revoked(self) -> int:
        """End connections if the peer's certificate has been revoked. Returns how many."""
        return sum(line.end_revoked() for line in (*self._loads, self._saves))

    def close(self) -> None:
        """End pushes and connections; a call under way fails."""
        self._is_closed = True
        with contextlib.suppress(queue.Full):
            self._pushes.put_nowait(None)
        for line in (*self._loads, self._saves):
            line.close()
