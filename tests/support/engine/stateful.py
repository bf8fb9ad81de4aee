"""The fake model with a state: a checksum of all tokens, beside the blocks. A state of other tokens ends the test."""

import zlib
from array import array
from dataclasses import replace

import numpy as np

from kvloom.contract.config import EngineConfig
from kvloom.contract.messages import Batch, StepOutput, Work
from kvloom.engine.engine import Engine
from kvloom.rank.fake import FakeRunner
from kvloom.rank.tier.kvmemory import KvMemory
from kvloom.rank.tier.statememory import Bytes, StateMemory
from tests.support.engine.engines import engine_over

_STATE_BYTES = 16
_STATE_HOST_BLOCKS = 2  # one has the number of tokens, the other their checksum
State = tuple[int, int]  # number of tokens, their checksum


class StatefulRunner(FakeRunner):
    """A FakeRunner whose sequences have states, and whose states may be kept for others."""

    def __init__(self, config: EngineConfig, num_states: int, num_snapshots: int) -> None:
        super().__init__(config)
        self.info.num_states, self.info.num_snapshots = num_states, num_snapshots
        self.info.state_host_blocks = _STATE_HOST_BLOCKS
        self._memory: list[State | None] = [None] * (num_states + num_snapshots)
        self._place: dict[int, int] = {}

    def kv_memory(self, model: str) -> KvMemory:
        states = StateMemory(_STATE_BYTES, self.info.block_size * 8, self._read_state, self._write_state)
        return replace(super().kv_memory(model), states=states)

    def _read_state(self, place: int, block: int) -> Bytes:
        slots = self._slots[self._span(block)] if block >= 0 else []
        state = self._memory[place]
        assert state is not None, f"place {place} holds no state"
        return np.array([*state, *slots], np.int64).view(np.uint8)

    def _write_state(self, place: int, block: int, data: Bytes) -> None:
        count, checksum, *slots = data.view(np.int64).tolist()
        self._memory[place] = count, checksum
        if block >= 0:
            self._slots[self._span(block)] = array("q", slots)

    def run(self, batch: Batch) -> StepOutput:
        for place, host_blocks in batch.swap_out_states:
            for host_block, number in zip(host_blocks, self._memory[place] or (), strict=True):
                self._host[host_block * self.info.block_size] = number
        for work in batch.work:
            if work.state_loads:
                count, checksum = (self._host[host_block * self.info.block_size] for host_block in work.state_loads)
                self._memory[work.state] = count, checksum
            if work.begun >= 0:
                self._memory[work.state] = self._memory[work.begun]
            if work.state >= 0:
                self._place[work.id] = work.state
        output = super().run(batch)
        for work in batch.work:
            if work.kept >= 0:
                self._memory[work.kept] = self._memory[self._place[work.id]]
        if batch.release and not self._states:
            self._memory = [None] * len(self._memory)
        return output

    def _write(self, work: Work) -> None:
        super()._write(work)
        place, tokens = self._place[work.id], self._states[work.id].token_ids + work.draft
        state = self._memory[place] if work.start else (0, 0)
        assert state == (work.start, _checksum(tokens[: work.start])), f"sequence {work.id} has another's state"
        end = work.start + work.num_tokens
        self._memory[place] = end, _checksum(tokens[:end])


def _checksum(tokens: list[int]) -> int:
    return zlib.crc32(array("q", tokens))


def stateful_engine(
    num_blocks: int = 64,
    block_size: int = 4,
    max_seq_len: int = 64,
    num_states: int = 4,
    num_snapshots: int = 8,
    num_host_blocks: int = 0,
    **config: object,
) -> Engine:
    """An engine whose answers `fake_answer` computes, over a model with states."""
    sizes = {"num_blocks": num_blocks, "block_size": block_size, "max_seq_len": max_seq_len}
    sizes["num_host_blocks"] = num_host_blocks
    return engine_over(stateful_runner(num_states, num_snapshots, **sizes), **config)


def stateful_runner(num_states: int, num_snapshots: int, **sizes: int) -> StatefulRunner:
    return StatefulRunner(EngineConfig(backend="fake", **sizes), num_states, num_snapshots)
