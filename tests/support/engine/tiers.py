"""Outer KV tiers in this process, for FakeRunner: working, slow or failing, as the test chooses."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvloom.contract.config import EngineConfig, TierConfig
from kvloom.contract.messages import Moved, Runner, Transfer
from kvloom.contract.states import FoundState
from kvloom.contract.windows import WindowBlocks, first_read, longest_prefix
from kvloom.engine.engine import Engine
from kvloom.rank.fake import ByteTokenizer
from kvloom.rank.tier.kvmemory import KvMemory
from kvloom.rank.tier.statememory import Bytes
from kvloom.rank.tier.tier import TieredRunner
from kvloom.rank.tier.watch import Watch
from tests.support.engine.engines import fake_runner, in_process

GARBAGE = -77


@dataclass(eq=False)
class FakeTier:
    """Keeps blocks of a FakeRunner by key. A transfer is carried out as a whole after `delay` polls (a save: after
    `save_delay` more).

    `finds(asked)`: how many of the stored blocks a load finds; the other blocks are filled with garbage.
    `reports(moved)`: what poll returns for finished transfers.
    """

    memory: KvMemory
    stored: dict[bytes, list[int]] = field(default_factory=dict)
    delay: int = 0
    save_delay: int = 0
    is_up: bool = True
    pool: str = "here"
    finds: Callable[[int], int] = lambda count: count
    reports: Callable[[list[Moved]], Iterable[Moved]] = lambda moved: moved
    waiting: list[tuple[int, bool, Transfer]] = field(default_factory=list)
    loads: list[Transfer] = field(default_factory=list)  # all that were asked for
    states: dict[tuple[bytes, int], Bytes] = field(default_factory=dict)  # by key and size
    coming: dict[int, tuple[tuple[bytes, int], Bytes]] = field(default_factory=dict)  # states that are being saved
    coming_windows: dict[int, list[Bytes]] = field(default_factory=dict)
    found: dict[int, Bytes] = field(default_factory=dict)  # states that wait to be settled, by transfer
    was_state: set[int] = field(default_factory=set)  # transfers that saved a state
    windows: dict[bytes, Bytes] = field(default_factory=dict)  # a window's blocks by key
    num_polls: int = 0

    def load(self, transfer: Transfer) -> None:
        self.loads.append(transfer)
        self.waiting.append((self.num_polls + self.delay, True, transfer))

    def save(self, transfer: Transfer) -> None:
        if (state := transfer.state) is not None:
            data = self.memory.states.read(state.place, state.block)
            self.coming[transfer.id] = (state.key, len(data)), data
            self.was_state.add(transfer.id)
        if transfer.windows is not None:
            read = self.memory.windows.read
            self.coming_windows[transfer.id] = list(map(read, transfer.windows.blocks))
        self.waiting.append((self.num_polls + self.delay + self.save_delay, False, transfer))

    def poll(self) -> list[Moved]:
        due = [item for item in self.waiting if item[0] <= self.num_polls]
        self.waiting = [item for item in self.waiting if item[0] > self.num_polls]
        self.num_polls += 1
        return list(self.reports([self._move(is_load, transfer) for _, is_load, transfer in due]))

    def settle(self, found: FoundState) -> None:
        if found.place < 0:
            self.found.pop(found.id, None)
        else:
            self.memory.states.write(found.place, found.block, self.found.pop(found.id))

    def close(self) -> None:
        pass

    def _move(self, is_load: bool, transfer: Transfer) -> Moved:
        if transfer.state is not None:
            key, data = self.coming.pop(transfer.id)
            self.states.setdefault(key, data)
            return Moved(transfer.id, 1)
        if transfer.windows is not None and not is_load:
            self.windows |= zip(transfer.windows.keys, self.coming_windows.pop(transfer.id), strict=True)
            return Moved(transfer.id, len(transfer.windows.blocks))
        if not is_load:
            for block, key in zip(transfer.blocks, transfer.keys, strict=True):
                self.stored[key] = self._read(block)
            return Moved(transfer.id, len(transfer.blocks))
        known = next((i for i, key in enumerate(transfer.keys) if key not in self.stored), len(transfer.keys))
        count = min(known, self.finds(known))
        position = 0
        if (search := transfer.search) is not None:
            size, states = self.memory.block_size, self.memory.states
            for position, key in search.candidates(search.num_known + count, size):
                if (data := self.states.get((key, states.size(position % size > 0)))) is not None:
                    self.found[transfer.id] = data
                    break
            else:
                position = 0
            count = min(count, max(0, position // size - search.num_known))
        if transfer.windows is not None:
            count, position = self._move_windows(transfer.windows, count)
        for i, (block, key) in enumerate(zip(transfer.blocks, transfer.keys, strict=True)):
            self._write(block, self.stored[key] if i < count else None)
        return Moved(transfer.id, count, position)

    def _move_windows(self, asked: WindowBlocks, count: int) -> tuple[int, int]:
        """Blocks of all tokens that are moved, and the position before which a window's are."""
        size, memory = self.memory.block_size, self.memory.windows
        keys = dict(enumerate(asked.keys, asked.first))
        end = longest_prefix(asked.num_known + count, memory.reach, size, lambda i: keys.get(i) in self.windows)
        window = range(first_read(end * size, memory.reach, size), end)
        if end < asked.least or len(window) > len(asked.blocks):
            return 0, 0
        for block, index in zip(asked.blocks, window, strict=False):
            memory.write(block, self.windows[keys[index]])
        return max(0, end - asked.num_known), end * size

    def _read(self, block: int) -> list[int]:
        return [int(view[block, slot, i]) for view, slot, i in self._numbers()]

    def _write(self, block: int, values: list[int] | None) -> None:
        for index, (view, slot, i) in enumerate(self._numbers()):
            view[block, slot, i] = GARBAGE if values is None else values[index]

    def _numbers(self) -> Iterator[tuple[Any, int, int]]:
        """The index of a block's numbers: tensor, token, number."""
        for view in (view for layer in self.memory.layers for view in layer):
            yield from ((view, slot, i) for slot in range(view.shape[1]) for i in range(view.shape[2]))


@dataclass(eq=False)
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def tiered_engine(
    stored: dict[bytes, list[int]] | None = None, num_blocks: int = 64, block_size: int = 4, **fields: Any
) -> tuple[Engine, FakeTier, Clock]:
    """An engine over the fake model with a FakeTier on `stored` and checksums of its blocks; `fields` are of
    EngineConfig.
    """
    return engine_over_tier(fake_runner(num_blocks, block_size, fields.pop("max_seq_len", 64)), stored, **fields)


def engine_over_tier(
    runner: Runner, stored: dict[bytes, list[int]] | None = None, **fields: Any
) -> tuple[Engine, FakeTier, Clock]:
    """The same over a runner."""
    watch = Watch(runner.kv_memory(""))
    tier = FakeTier(watch.memory, {} if stored is None else stored)
    clock = Clock()
    config = EngineConfig(
        backend="fake", kv_tier=TierConfig("tests.support.engine.tiers:FakeTier", timeout_s=1.0), **fields
    )
    executor = in_process(TieredRunner(runner, tier, watch), config)
    return Engine(config, executor, ByteTokenizer(), clock=clock), tier, clock
