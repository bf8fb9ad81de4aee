"""Blocks that another node announced and sends: received into the pool's memory, and published if their sums hold."""

from collections.abc import Iterator
from typing import NamedTuple

from ems.common.channel import Channel
from ems.wire.messages import Cause, Status
from kvloom.pool.cluster.block_stream import receive_summed
from kvloom.pool.storage.entries import Begun, Block, NoRoom, Reservation, Written
from kvloom.pool.storage.pool import Pool

_BATCH_BLOCKS = 64  # that are reserved, received and published together
_BATCH_BYTES = 8 << 20  # likewise, the last block apart
_BATCH_SHARE = 1 / 16  # of the tenant's quota, likewise: what is reserved counts as nobody's copy yet


class Incoming(NamedTuple):
    """A block that another node announces; its bytes follow. parent: the key before it in its chain, or empty.

    is_rcache: its home is elsewhere, and it stays here as a copy.
    """

    key: bytes
    length: int
    checksum: bytes
    parent: bytes = b""
    is_rcache: bool = False


class Received(NamedTuple):
    """What became of it. problem: NONE, CORRUPT or NO_ROOM; entry: the block of its key, pinned, if there is one."""

    problem: Cause
    status: Status
    entry: Block | None


def receive_blocks(channel: Channel, pool: Pool, blocks: list[Incoming], deadline_s: float) -> Iterator[list[Received]]:
    """Reads the blocks' bytes from the channel into the pool, batch by batch, and publishes those whose sums hold.

    Each batch's blocks are pinned, by who takes them. Raises as the channel does; then the batch that was being
    received is given up, and nothing of it is kept.
    """
    start, limit = 0, min(_BATCH_BYTES, pool.usage()["quota_bytes"] * _BATCH_SHARE)
    while start < len(blocks):
        end, size = start, 0
        while end < len(blocks) and end - start < _BATCH_BLOCKS and size < limit:
            size += blocks[end].length
            end += 1
        yield _receive(channel, pool, blocks[start:end], deadline_s)
        start = end


def _receive(channel: Channel, pool: Pool, blocks: list[Incoming], deadline_s: float) -> list[Received]:
    begun = _begin(pool, blocks)
    try:
        targets = [pool.view(each.offset, each.length) if isinstance(each, Reservation) else None for each in begun]
        sums = receive_summed(channel, targets, [block.length for block in blocks], deadline_s)
    except BaseException:
        for each in begun:
            if isinstance(each, Reservation):
                pool.abandon(each)
        pool.unpin([each for each in begun if not isinstance(each, Reservation | NoRoom)])
        raise
    written = [
        Written(each, block.checksum, block.parent)
        for each, block, found in zip(begun, blocks, sums, strict=True)
        if isinstance(each, Reservation) and found == block.checksum
    ]
    published = dict(zip((one.reservation.offset for one in written), pool.publish_all(written), strict=True))
    received = []
    for each, block in zip(begun, blocks, strict=True):
        if isinstance(each, NoRoom):
            received.append(Received(Cause.NO_ROOM, each.status, None))
        elif not isinstance(each, Reservation):
            is_same = each.checksum == block.checksum and each.length == block.length
            received.append(Received(Cause.NONE, Status.DUPLICATE if is_same else Status.CONFLICT, each))
        elif each.offset in published:
            received.append(Received(Cause.NONE, *published[each.offset]))
        else:
            pool.abandon(each)
            pool.counts.add("corrupt_on_wire")
            received.append(Received(Cause.CORRUPT, Status.NO_ROOM, None))
    return received


def _begin(pool: Pool, blocks: list[Incoming]) -> list[Begun]:
    """What each meets: one that finds no room does not keep out those behind it."""
    begun: list[Begun] = []
    while len(begun) < len(blocks):
        rest = blocks[len(begun) :]
        begun += pool.begin_all(
            [block.key for block in rest], [block.length for block in rest], [block.is_rcache for block in rest]
        )
    return begun
