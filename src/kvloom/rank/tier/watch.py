"""Watch: a debug mode of the outer KV tier that detects any wrong byte in the KV cache. Slow.

A block's checksum, over its key and its bytes as steps read them, travels through the tier in a tensor of its own and
is compared with the KV cache after the load. After each load, every block that no step may have written since must be
unchanged too.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import xxhash

from kvloom.contract.errors import BadRequest
from kvloom.contract.messages import Batch, Moved, Transfer
from kvloom.rank.tier.kvmemory import KvMemory

_SUM_BYTES = 16


class WrongBytes(Exception):
    """A block of the KV cache does not hold what it must; answers computed with it would be wrong."""


class Watch:
    """Checks every batch before (`begin`) and after (`end`) it runs. `memory` is what the tier gets: checksums
    included.
    """

    def __init__(self, memory: KvMemory) -> None:
        """Raises BadRequest for a cache on a device."""
        try:
            dtype = np.asarray(memory.layers[0][0]).dtype
        except TypeError:
            raise BadRequest("kv_tier.is_watched", "needs a KV cache in host memory") from None
        shape = (memory.num_blocks, memory.block_size, -(-_SUM_BYTES // (memory.block_size * dtype.itemsize)))
        sums = np.zeros(shape, dtype)
        self.memory = replace(
            memory,
            layers=[*memory.layers, [sums]],
            block_bytes=memory.block_bytes + sums.nbytes // memory.num_blocks,
        )
        self._travelling = sums.reshape(memory.num_blocks, -1).view(np.uint8)[:, :_SUM_BYTES]  # one row a block
        self._tables: dict[int, list[int]] = {}  # block table of each sequence, as the rank knows it
        self._loads: dict[int, Transfer] = {}
        self._settled: dict[int, bytes] = {}  # block -> checksum, which only a step or a load may change

    def begin(self, batch: Batch) -> None:
        """Raises WrongBytes when a block to be saved is not what was computed."""
        for save in batch.saves:
            self._check(save.blocks)
            for block, key in zip(save.blocks, save.keys, strict=True):
                self._travelling[block] = np.frombuffer(self._sum(block, key), np.uint8)
        for block in batch.release:
            self._settled.pop(block, None)
        for found in batch.found:
            self._settled.pop(found.block, None)  # the tail of a state is not checked
        for load in batch.loads:
            self._loads[load.id] = load
            for block in load.blocks:
                self._travelling[block] = 0  # so that a checksum there can only be one that was loaded
                self._settled.pop(block, None)

    def end(self, batch: Batch, moved: Iterable[Moved]) -> None:
        """Raises WrongBytes when a loaded or an unrelated block is not what it must be."""
        for id in batch.drop:
            self._tables.pop(id, None)
        for block in self._written(batch):
            self._settled[block] = self._sum(block)
        ended = [(self._loads.pop(report.id), report.num_blocks) for report in moved if report.id in self._loads]
        for load, count in ended:
            for block, key in zip(load.blocks[: max(0, count)], load.keys, strict=False):
                if self._travelling[block].tobytes() != self._sum(block, key):
                    raise WrongBytes(f"block {block} was loaded and does not hold what was saved")
                self._settled[block] = self._sum(block)
        if ended:
            self._check(list(self._settled))

    def _written(self, batch: Batch) -> set[int]:
        """Blocks that the batch's step may have written."""
        written, size = set(), self.memory.block_size
        for work in batch.work:
            table = self._tables.setdefault(work.id, [])
            table[work.first_block :] = work.blocks
            written.update(table[work.start // size : -(-(work.start + work.num_tokens) // size)])
            written.update(block for _host_block, block in work.loads)
        return written

    def _check(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block in self._settled and self._settled[block] != self._sum(block):
                raise WrongBytes(f"block {block} has changed, though no step and no load of it has written there")

    def _sum(self, block: int, key: bytes = b"") -> bytes:
        hashed = xxhash.xxh3_128(key)
        for piece in self.memory.read(block):
            hashed.update(piece)
        return bytes(hashed.digest())
