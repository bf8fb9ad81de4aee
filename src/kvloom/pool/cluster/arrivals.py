"""Blocks that another node announced and sends: received into the pool's memory, and published if their sums hold."""

from collections.abc import Iterator

from ems.common.channel import Channel
from kvloom.pool.cluster.block_stream import receive_summed
from kvloom.pool.storage.passing import UNSOUND, Announced, Arrived
from kvloom.pool.storage.pool import Pool

_BATCH_BLOCKS = 64  # blocks reserved, received and published together
_BATCH_BYTES = 8 << 20  # bytes likewise, without the last block
_BATCH_SHARE = 1 / 16  # share of the tenant's quota likewise: reserved memory does not count as copies yet


def receive_blocks(channel: Channel, pool: Pool, blocks: Announced, deadline_s: float) -> Iterator[Arrived]:
    """Read the blocks' bytes from the channel into the pool, batch by batch, and publish those whose checksums match.

    The caller releases the pins of each batch. Raises as the channel does; then nothing of the batch under way is kept.
    """
    start, limit = 0, min(_BATCH_BYTES, pool.usage()["quota_bytes"] * _BATCH_SHARE)
    while start < len(blocks.keys):
        end, size = start, 0
        while end < len(blocks.keys) and end - start < _BATCH_BLOCKS and size < limit:
            size += blocks.lengths[end]
            end += 1
        arrival = pool.arrive(blocks.part(start, end))
        try:
            sums = receive_summed(channel, arrival.spans, deadline_s)
        except BaseException:
            arrival.give_up()
            raise
        arrived = arrival.settle(sums)
        if num_unsound := arrived.statuses.count(UNSOUND):
            pool.counts.add("corrupt_on_wire", num_unsound)
        yield arrived
        start = end
