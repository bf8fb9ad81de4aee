"""The fake model with layers that see a window: their tokens lie in blocks of their own, which are read before each
step. A block of other tokens, or one that was given back too early, ends the test.
"""

from dataclasses import replace

import numpy as np

from kvloom.contract.config import EngineConfig
from kvloom.contract.messages import Batch, StepOutput, Work
from kvloom.engine.engine import Engine
from kvloom.rank.fake import FakeRunner
from kvloom.rank.tier.kvmemory import KvMemory
from kvloom.rank.tier.statememory import Bytes
from kvloom.rank.tier.windowmemory import WindowMemory
from tests.support.engine.engines import engine_over

Slots = list[int | None]
_NOTHING = -(1 << 62)


class WindowedRunner(FakeRunner):
    """A FakeRunner that keeps the last tokens of each sequence once more, in a window's blocks."""

    def __init__(self, config: EngineConfig, num_window_blocks: int, reach: int) -> None:
        super().__init__(config)
        self.info.num_window_blocks, self.info.reach = num_window_blocks, reach
        size = self.info.block_size
        self._windows: list[Slots] = [[None] * size for _ in range(num_window_blocks)]
        self._window_host: list[Slots] = [[None] * size for _ in range(self.info.num_host_blocks)]
        self._tables: dict[int, list[int]] = {}

    def kv_memory(self, model: str) -> KvMemory:
        size = self.info.block_size * 8
        return replace(super().kv_memory(model), windows=WindowMemory(size, self.info.reach, self._copy, self._paste))

    def _copy(self, block: int) -> Bytes:
        return np.array([_NOTHING if token is None else token for token in self._windows[block]]).view(np.uint8)

    def _paste(self, block: int, data: Bytes) -> None:
        self._windows[block] = [None if token == _NOTHING else token for token in data.view(np.int64).tolist()]

    def run(self, batch: Batch) -> StepOutput:
        for block in batch.release_windows:
            self._windows[block] = [None] * self.info.block_size
        for block, host_block in batch.swap_out_windows:
            self._window_host[host_block] = list(self._windows[block])
        for work in batch.work:
            assert len(work.windows) == len(work.blocks)
            for host_block, block in work.window_loads:
                self._windows[block] = list(self._window_host[host_block])
            self._tables.setdefault(work.id, [])[work.first_block :] = work.windows
            if work.copied_window >= 0:
                target = work.windows[work.start // self.info.block_size - work.first_block]
                self._windows[target] = list(self._windows[work.copied_window])
        return super().run(batch)

    def _write(self, work: Work) -> None:
        super()._write(work)
        state, size = self._states[work.id], self.info.block_size
        for position in range(work.start, work.start + work.num_tokens):
            block = self._tables[work.id][position // size]
            assert block >= 0, f"sequence {work.id} has no block for the token at {position}"
            self._windows[block][position % size] = self._slots[self._slot(state, position)]

    def _read(self, work: Work, output: StepOutput) -> None:
        state, size, table = self._states[work.id], self.info.block_size, self._tables[work.id]
        for position in range(max(0, work.start + 1 - self.info.reach), work.start + work.num_tokens):
            block = table[position // size]
            token = self._windows[block][position % size] if block >= 0 else None
            assert token == self._slots[self._slot(state, position)], f"sequence {work.id} has lost {position}"
        super()._read(work, output)


def windowed_runner(
    num_blocks: int = 64, block_size: int = 4, max_seq_len: int = 64, num_window_blocks: int = 24, reach: int = 9,
    num_host_blocks: int = 0,
) -> WindowedRunner:  # fmt: skip
    sizes = {"num_blocks": num_blocks, "block_size": block_size, "max_seq_len": max_seq_len}
    config = EngineConfig(backend="fake", num_host_blocks=num_host_blocks, **sizes)
    return WindowedRunner(config, num_window_blocks, reach)


def windowed_engine(
    num_blocks: int = 64, block_size: int = 4, max_seq_len: int = 64, num_window_blocks: int = 24, reach: int = 9,
    num_host_blocks: int = 0, **config: object,
) -> Engine:  # fmt: skip
    """An engine whose answers `fake_answer` computes, over a model with windows."""
    runner = windowed_runner(num_blocks, block_size, max_seq_len, num_window_blocks, reach, num_host_blocks)
    return engine_over(runner, **config)
