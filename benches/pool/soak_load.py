"""The load of the pool's soak: saves, loads, puts and gets on any node for any tenant. An oracle knows the bytes."""

import hashlib
import random
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benches.pool.soak_world import TENANTS, Node, World
from ems import CcConfig, CcKvOption, EmsConfig, EmsErrorCode, EmsException, KvPool
from ems.session import Session

_OPTION = CcKvOption(timeout=2000)
_BLOCKS = 48  # blocks in a client's cache
_CHAINS = 60  # prefixes in use at one time
_UNTOUCHED = 0xEE
_SEEN_S = 3.0  # another node must find the saved blocks within this time
_CALLS = 40  # calls on one connection, before the client changes node or tenant
SIZES = (16 << 10, 64 << 10, 200_000)  # bytes of a block, of models that alternate


class WrongBytes(Exception):
    """A load returned other bytes than were saved."""


def truth(tenant: str, size: int, block_hash: int) -> np.ndarray:
    """The bytes of a block; they differ by tenant, size and hash."""
    digest = hashlib.sha512(f"{tenant}|{size}|{block_hash}".encode()).digest()
    words = np.frombuffer(digest, np.uint64)
    numbers = np.arange(-(-size // 64), dtype=np.uint64)[:, None] * (words | np.uint64(1)) + words[::-1]
    return numbers.view(np.uint8).reshape(-1)[:size]


@dataclass(frozen=True, slots=True)
class Seat:
    """The node and tenant for which a client works for a while."""

    node: Node
    tenant: str
    size: int
    key: str

    def config(self) -> EmsConfig:
        return EmsConfig(self.tenant, self.key, CcConfig(0, 0, "soak"))

    def locate(self, _deadline_s: float) -> Path:
        return self.node.socket


class Worker:
    """A client's cache, and its calls over one connection."""

    def __init__(self, seat: Seat, dice: random.Random, counts: Counter[str]) -> None:
        self._seat, self._dice, self._counts = seat, dice, counts
        self._rows = np.zeros((_BLOCKS, 1, seat.size), np.uint8)
        self._session = Session(seat.config(), seat.locate)
        self._session.caching.register_kvcache([[self._rows]])
        self._values = KvPool(seat.config(), f"soak {seat.size}", seat.locate)

    def close(self) -> None:
        self._session.close()
        self._values.close()

    def hashes(self, chain: int, count: int) -> list[int]:
        return [chain * 1000 + i for i in range(count)]

    def save(self, chain: int, count: int) -> tuple[int, int]:
        """Save; the reported number of blocks in the pool, and the number of those that are on this node only."""
        names = self.hashes(chain, count)
        for row, name in enumerate(names):
            self._rows[row, 0] = truth(self._seat.tenant, self._seat.size, name)
        result = self._session.caching.save(list(range(count)), names, [1] * count, _OPTION)
        self._counts["saved"] += result.success
        self._counts["saved, local"] += result.local
        self._counts["not saved"] += result.total - result.success
        return result.success, result.local

    def load(self, chain: int, count: int) -> None:
        """Load and compare every byte. Raises WrongBytes."""
        names = self.hashes(chain, count)
        self._rows[:count] = _UNTOUCHED
        found = self._session.caching.load(list(range(count)), names, [1] * count, _OPTION).success
        for row, name in enumerate(names[:found]):
            if not np.array_equal(self._rows[row, 0], truth(self._seat.tenant, self._seat.size, name)):
                raise WrongBytes(f"{self._seat}: block {name} of a load")
        if (self._rows[found:count] != _UNTOUCHED).any():
            raise WrongBytes(f"{self._seat}: a block behind the prefix was written")
        self._counts["compared"] += found
        self._counts["missed"] += count - found

    def exists(self, chain: int, count: int) -> int:
        return self._session.caching.exists(self.hashes(chain, count), _OPTION)

    def put(self, chain: int, count: int) -> None:
        names = self.hashes(chain, count)
        values = [truth(self._seat.tenant, self._seat.size, name) for name in names]
        statuses = self._values.put([str(name) for name in names], values, _OPTION, is_chain=True)
        self._counts["put"] += sum(status.is_success for status in statuses)

    def get(self, chain: int, count: int) -> None:
        names = self.hashes(chain, count)
        targets = [np.full(self._seat.size, _UNTOUCHED, np.uint8) for _ in names]
        found = self._values.get([str(name) for name in names], targets, _OPTION)
        for name, target, is_found in zip(names, targets, found, strict=True):
            expected = truth(self._seat.tenant, self._seat.size, name) if is_found else _UNTOUCHED
            if not (target == expected).all():
                raise WrongBytes(f"{self._seat}: value {name}, found: {is_found}")
        self._counts["compared values"] += sum(found)


class Clients:
    """Threads that work until they are stopped, and their counts."""

    def __init__(self, world: World, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._world, self._seed = world, seed
        self._began_s = time.monotonic()
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, count: int) -> None:
        for i in range(count):
            counts: Counter[str] = Counter()
            thread = threading.Thread(target=self._run, args=(random.Random(self._seed * 1000 + i), counts))
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Stop the threads; returns when every running call has ended."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, dice: random.Random, counts: Counter[str]) -> None:
        while not self._is_over.is_set():
            here = self._world.here()
            if not here:
                time.sleep(0.1)
                continue
            tenant = dice.choice(TENANTS)
            seat = Seat(dice.choice(here), tenant, self._size(dice), self._world.keys[tenant])
            try:
                self._work(seat, dice, counts)
            except WrongBytes as error:
                self.wrong.append(str(error))
            except EmsException as error:
                self._note(error, counts)
                time.sleep(0.1)
            except Exception as error:
                self.wrong.append(f"{type(error).__name__}: {error}")
            self.counts.update(counts)
            counts.clear()

    def _size(self, dice: random.Random) -> int:
        """Mostly the block size of the current model; the models alternate every two minutes."""
        turn = int((time.monotonic() - self._began_s) // 120)
        return SIZES[turn % len(SIZES)] if dice.random() < 0.8 else dice.choice(SIZES)

    def _note(self, error: EmsException, counts: Counter[str]) -> None:
        code = error.status_code()
        counts[f"error: {code.name}"] += 1
        if code in (EmsErrorCode.EMS_INVALID_ARGUMENT, EmsErrorCode.EMS_INTERNAL_ERROR):
            self.wrong.append(str(error))

    def _work(self, seat: Seat, dice: random.Random, counts: Counter[str]) -> None:
        with closing(Worker(seat, dice, counts)) as worker:
            for _ in range(_CALLS):
                if self._is_over.is_set() or not seat.node.is_here:
                    return
                chain = int(_CHAINS * dice.random() ** 2) + int(time.monotonic() - self._began_s) // 60 * 10
                count = dice.randrange(1, _BLOCKS // (1 if seat.size < 1 << 17 else 4))
                action = dice.random()
                if action < 0.35:
                    self._save_and_look(worker, seat, (chain, count), dice, counts)
                elif action < 0.75:
                    worker.load(chain, count)
                elif action < 0.87:
                    worker.put(chain, count)
                else:
                    worker.get(chain, count)

    def _save_and_look(
        self, worker: Worker, seat: Seat, what: tuple[int, int], dice: random.Random, counts: Counter[str]
    ) -> None:
        """Save, and let another node check the report; only between disturbances, since a killed node loses blocks."""
        chain, count = what
        before = self._world.epoch
        reported, local = worker.save(chain, count)
        others = [node for node in self._world.here() if node is not seat.node]
        if dice.random() < 0.7 or before % 2 or not others or not reported:
            return
        there = Seat(dice.choice(others), seat.tenant, seat.size, seat.key)
        with closing(Worker(there, dice, counts)) as other:
            end_s, found = time.monotonic() + _SEEN_S, 0
            while found < reported and time.monotonic() < end_s:
                found = max(found, other.exists(chain, reported))
                time.sleep(0.02)
        if self._world.epoch == before:
            counts["reported"] += reported
            counts["reported, on that node only"] += local
            counts["reported, found from another node"] += found
