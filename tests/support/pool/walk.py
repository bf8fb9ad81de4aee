"""`python -m tests.support.pool.walk --minutes 15`: random calls on real agents, every answer compared with an oracle.

A walk has a world (one node or three; TLS, snapshots, direct writes, with or without C++), KV caches of many shapes,
and calls of every kind. Worlds have room for all that a walk saves, so a miss without a reason is an error.
"""

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ems import CcConfig, CcKvOption, CcResult, EmsConfig, EmsErrorCode, EmsException, KvPool, KvStatus
from ems.context_caching import CcFuture
from ems.session import Session
from tests.support.pool.calls import Call, Calls, Crowded, Hashed, Tokens
from tests.support.pool.shapes import KvCache, Shape, random_shape, true_bytes
from tests.support.pool.worlds import KINDS, SLAB_BYTES, World

_SETTLED_S = 120.0  # at most, until another node finds a block that was saved
_ROOM_BYTES = 12 << 20  # bytes of blocks in a world: far less than it can keep
_MODELS = CcConfig(rank_id=0, device_id=0, model_id="walk")


class Wrong(Exception):
    """The pool's answer or behaviour contradicts the oracle."""


@dataclass
class Known:
    """The oracle's knowledge. ever: was saved at some time; here: must be found on that node; everywhere: on any."""

    ever: set[str] = field(default_factory=set)
    here: dict[int, set[str]] = field(default_factory=dict)
    everywhere: set[str] = field(default_factory=set)

    def forget(self) -> None:
        """A node has lost its blocks."""
        self.here.clear()
        self.everywhere.clear()

    def prefix(self, names: list[str], known: set[str]) -> int:
        return next((i for i, name in enumerate(names) if name not in known), len(names))


class Walk:
    """Random calls in one world until its room or the time is used up."""

    def __init__(self, world: World, dice: random.Random, counts: Counter[str]) -> None:
        self.world, self.dice, self.counts = world, dice, counts
        self.known = Known()
        self.values: dict[tuple[str, int], str] = {}
        self.num_bytes = 0
        self.kept: list[tuple[Shape, Hashed | Tokens]] = []

    def run(self, num_rounds: int, end_s: float = math.inf) -> None:
        """Each round is a client on a node, with a new cache, and some calls."""
        for number in range(num_rounds):
            if self.num_bytes > _ROOM_BYTES or time.monotonic() > end_s:
                return
            shape, node = self._shape(), self.dice.randrange(len(self.world.nodes))
            with ExitStack() as stack:
                client = Client(self, node, shape, stack)
                for _ in range(self.dice.randrange(2, 9)):
                    client.turn()
            if number % 4 == 3:
                self.disturb()

    def _shape(self) -> Shape:
        """A new shape, or an earlier one, perhaps with another library and other gaps between blocks."""
        if not self.kept or self.dice.random() < 0.5:
            return random_shape(self.dice, SLAB_BYTES)
        shape, _kind = self.dice.choice(self.kept)
        return replace(
            shape, is_torch=shape.item == "bfloat16" or self.dice.random() < 0.5, gap=self.dice.choice([0, 5])
        )

    def disturb(self) -> None:
        """Disturbs the world; blocks that must have survived stay known."""
        name, keeps = self.world.disturb(self.dice)
        self.counts[name] += 1
        if not keeps:
            self.known.forget()
            self.values.clear()


class Client:
    """A KV cache registered on one node."""

    def __init__(self, walk: Walk, node: int, shape: Shape, stack: ExitStack) -> None:
        self.walk, self.dice, self.node, self.shape = walk, walk.dice, node, shape
        self.cache = KvCache(shape)
        self.calls = Calls(walk.dice, self.cache)
        self.session = stack.enter_context(self._opened(node, self.cache))
        config = EmsConfig(cc_config=_MODELS)
        self.pool = stack.enter_context(KvPool(config, "walk", self.walk.world.locator(node)))

    def _opened(self, node: int, cache: KvCache) -> ExitStack:
        stack, session = ExitStack(), Session(EmsConfig(cc_config=_MODELS), self.walk.world.locator(node))
        stack.callback(session.close)
        cache.register(session.caching)
        self.caching = session.caching
        return stack

    def turn(self) -> None:
        often: list[Callable[[], None]] = [self.save_and_load] * 4 + [self.load_known] * 3 + [self.put_and_get] * 2
        with suppress(Crowded):
            self.dice.choice([*often, self.two_at_once, self.killed_between, self.refused])()

    def option(self) -> CcKvOption:
        return CcKvOption(timeout=120_000, write_rcache=self.dice.random() < 0.8)

    def save_and_load(self) -> None:
        """`exists` and a load must find every reported block at once, here and from another node."""
        kind = self.calls.new_blocks()
        call = self.calls.new_call(kind)
        self.save(call)
        self.walk.kept.append((self.shape, kind))
        again = self.calls.new_call(kind)
        self.load(again, self.node, self.caching, self.cache)
        if len(self.walk.world.nodes) > 1 and self.dice.random() < 0.5:
            self.elsewhere(kind)

    def load_known(self) -> None:
        """Loads blocks that clients of this shape saved before, on this node or another."""
        kinds = [kind for shape, kind in self.walk.kept if shape.layout == self.shape.layout]
        self.load(self.calls.new_call(self.dice.choice(kinds) if kinds else None), self.node, self.caching, self.cache)

    def elsewhere(self, kind: Hashed | Tokens) -> None:
        others = [node for node in range(len(self.walk.world.nodes)) if node != self.node]
        there, cache = self.dice.choice(others), KvCache(self.shape)
        mine = self.caching
        with self._opened(there, cache):
            other, self.caching = self.caching, mine
            call = self.calls.new_call(kind)
            wanted = self.walk.known.prefix(call.names, self.walk.known.everywhere)
            end_s, found = time.monotonic() + _SETTLED_S, -1
            while found < wanted:
                found = self.load(call, there, other, cache)
                if time.monotonic() > end_s:
                    raise Wrong(f"{wanted} of {call.names} were reported, another node finds {found}")
            self.walk.counts["found elsewhere"] += found

    def write(self, call: Call) -> None:
        for slots, data in zip(call.slots, call.data, strict=True):
            for group, (of_group, rows) in enumerate(zip(slots, data, strict=True)):
                self.cache.write(group, of_group, rows)

    def save(self, call: Call) -> None:
        self.cache.wipe()
        self.write(call)
        before = self.cache.copy()
        self.walk.known.ever.update(call.names)
        if self.dice.random() < 0.3:
            result = self.caching.async_save(**call.arguments, option=self.option()).result()
        else:
            result = self.caching.save(**call.arguments, option=self.option())
        if not self.cache.equals(before):
            raise Wrong("a save changed the cache")
        self.note_saved(call, result)

    def note_saved(self, call: Call, result: CcResult) -> None:
        known, success = self.walk.known, result.success
        if (result.total, success) != (len(call.names), call.num_fitting):
            raise Wrong(f"a save of {len(call.names)} blocks, {call.num_fitting} of a size that is kept: {result}")
        known.here.setdefault(self.node, set()).update(call.names[:success])
        if not result.local:
            known.everywhere.update(call.names[:success])
        self.walk.num_bytes += sum(call.sizes[:success])
        self.walk.counts.update({"blocks saved": success, "local": result.local})

    def load(self, call: Call, node: int, caching: object, cache: KvCache) -> int:
        """Loads, and compares every byte of the cache: loaded blocks are correct, and nothing else has changed."""
        known = self.walk.known
        cache.wipe()
        expected = cache.copy()
        exists = self.exists(call, caching)
        if self.dice.random() < 0.3:
            result = caching.async_load(**call.arguments, option=self.option()).result()
        else:
            result = caching.load(**call.arguments, option=self.option())
        found = cache.copy()
        self.expect(call, result.success, cache, expected)
        if any(
            not np.array_equal(a, b) for x, y in zip(found, cache.bases, strict=True) for a, b in zip(x, y, strict=True)
        ):
            raise Wrong(f"wrong bytes in {self.shape}: {call.arguments}, {result}")
        most = known.prefix(call.names, known.ever)
        least = known.prefix(call.names, known.here.get(node, set()) if node == self.node else set())
        if not least <= result.success <= most or result.total != len(call.names):
            raise Wrong(f"{result} of {call.names}, which has at least {least}, at most {most}; node {node}")
        if exists is not None and exists != result.success and exists < least:
            raise Wrong(f"exists said {exists}, a load found {result.success}")
        self.walk.counts["blocks compared"] += result.success
        return result.success

    def exists(self, call: Call, caching: object) -> int | None:
        if "offsets" not in call.arguments:
            return None
        return caching.exists(call.arguments["hashes"], self.option(), call.arguments["offsets"])

    def expect(self, call: Call, success: int, cache: KvCache, before: list[list[np.ndarray]]) -> None:
        """Computes the cache's expected contents after a load: unchanged except for the found blocks' tokens."""
        for bases, copies in zip(cache.bases, before, strict=True):
            for base, copy in zip(bases, copies, strict=True):
                base[:] = copy
        for i in range(success):
            skipped = call.first if i == 0 else 0
            for group, slots in enumerate(call.slots[i]):
                cache.write(group, slots[skipped:], call.data[i][group][:, skipped:])

    def two_at_once(self) -> None:
        """Asynchronous saves of different slots at once, then loads of both."""
        taken: set[tuple[int, int]] = set()
        kinds = [self.calls.new_blocks() for _ in range(2)]
        calls = [self.calls.new_call(kind, taken) for kind in kinds]
        self.cache.wipe()
        futures: list[CcFuture] = []
        for call in calls:
            self.write(call)
            self.walk.known.ever.update(call.names)
        for call in calls:
            futures.append(self.caching.async_save(**call.arguments, option=self.option()))
        for call, future in zip(calls, futures, strict=True):
            self.note_saved(call, future.result())
        for kind in kinds:
            self.load(self.calls.new_call(kind), self.node, self.caching, self.cache)

    def put_and_get(self) -> None:
        """Values by keys: the first value stored under a key and length stays."""
        dice, values = self.dice, self.walk.values
        names = [
            (f"k{dice.randrange(9)}", dice.choice([1, 17, 4096, 12345, 65536, SLAB_BYTES, SLAB_BYTES + 1]))
            for _ in range(dice.randrange(1, 6))
        ]
        names = list(dict.fromkeys(names))
        others = 2 if len(self.walk.world.nodes) == 1 else 1  # a node does not ask a key's home which value was first
        owners = [f"v|{key}|{size}|{dice.randrange(others)}" for key, size in names]
        data = [true_bytes(owner, size) for owner, (_key, size) in zip(owners, names, strict=True)]
        keys: list[object] = [key for key, _size in names]
        statuses = self.pool.put(keys, [self._pieces(one) for one in data], self.option(), dice.random() < 0.5)
        for name, owner, status in zip(names, owners, statuses, strict=True):
            if status is KvStatus.STORED and values.get(name, owner) != owner:
                raise Wrong(f"{name} was {values[name]}, and a put of others said STORED")
            if status is KvStatus.CONFLICT and values.get(name) == owner:
                raise Wrong(f"{name} was the same, and a put said CONFLICT")
            if name[1] > SLAB_BYTES and status is not KvStatus.TOO_LARGE:
                raise Wrong(f"{name} is too large, and a put said {status!r}")
            if status in (KvStatus.STORED, KvStatus.PRESENT):
                values[name] = owner
            self.walk.num_bytes += name[1] * (status is KvStatus.STORED)
            self.walk.counts[f"put {status.name}"] += 1
        targets = [np.full(size, 0xEE, np.uint8) for _key, size in names]
        is_there = self.pool.exists(keys, [size for _key, size in names], self.option())
        found = self.pool.get(keys, [self._pieces(one) for one in targets], self.option())
        for name, status, target, is_found, said in zip(names, statuses, targets, found, is_there, strict=True):
            self.check_value(name, status, target, (is_found, said))

    def check_value(
        self, name: tuple[str, int], status: KvStatus, target: np.ndarray, found: tuple[bool, bool]
    ) -> None:
        is_found, said = found
        if (status.is_success and not (is_found and said)) or (is_found and name[1] > SLAB_BYTES):
            raise Wrong(f"{name}: put said {status!r}, exists {said}, get {is_found}")
        if not is_found and (target != 0xEE).any():
            raise Wrong(f"{name} was not found, and its target changed")
        truths = (
            [self.walk.values[name]] if name in self.walk.values else [f"v|{name[0]}|{name[1]}|{i}" for i in (0, 1)]
        )
        if is_found and not any(np.array_equal(target, true_bytes(one, name[1])) for one in truths):
            raise Wrong(f"{name}: wrong bytes")
        self.walk.counts["values compared"] += is_found

    def _pieces(self, data: np.ndarray) -> object:
        if len(data) > 1 and self.dice.random() < 0.4:
            cut = self.dice.randrange(1, len(data))
            return [data[:cut], data[cut:]]
        return data

    def killed_between(self) -> None:
        """The agent dies during calls: they end with a result or an error, and no byte is wrong."""
        if not self.walk.world.can_kill or self.dice.random() < 0.6:
            return
        call = self.calls.new_call()
        self.walk.known.ever.update(call.names)
        self.cache.wipe()
        self.write(call)
        saving = self.caching.async_save(**call.arguments, option=CcKvOption(timeout=20_000))
        time.sleep(self.dice.random() * 0.002)
        self.walk.world.kill(self.node)
        self.walk.known.forget()
        self.walk.values.clear()
        self.walk.counts["killed between"] += 1
        try:
            result = saving.result()
            if result.success > len(call.names):
                raise Wrong(f"{result} of a save of {len(call.names)}")
        except EmsException as error:
            if error.status_code() not in (EmsErrorCode.EMS_IO_ERROR, EmsErrorCode.EMS_IO_TIMEOUT):
                raise Wrong(f"a save while the agent died: {error}") from error
        self.walk.world.start(self.node)

    def refused(self) -> None:
        """Wrong arguments are refused by name, and change nothing."""
        call = self.calls.new_call()
        self.cache.wipe()
        before, arguments = self.cache.copy(), dict(call.arguments)
        name = self.dice.choice(sorted(arguments))
        if name == "mask":
            arguments[name] = [1, 0] * len(call.names)
        elif name == "chunk_descs":
            arguments[name] = [[(self.cache.slots(0), 1)] * len(call.names)] * len(self.shape.groups)
        else:
            arguments[name] = [*list(map(int, arguments[name])), 1.5]
        for ask in (self.caching.save, self.caching.load, self.caching.async_load):
            try:
                ask(**arguments)
            except EmsException as error:
                if error.status_code() != EmsErrorCode.EMS_INVALID_ARGUMENT or name not in str(error):
                    raise Wrong(f"{name} was wrong: {error}") from error
            else:
                raise Wrong(f"{name} was wrong, and nobody said so: {arguments}")
        if not self.cache.equals(before):
            raise Wrong("a refused call changed the cache")


def walk(kind: str, seed: int, num_rounds: int, end_s: float, counts: Counter[str]) -> None:
    """Walks through one world. Raises Wrong, or an exception of the test itself."""
    with tempfile.TemporaryDirectory(prefix="kvloom-walk-") as folder, World(kind, Path(folder)) as world:
        Walk(world, random.Random(seed), counts).run(num_rounds, end_s)
    counts[f"worlds: {kind}"] += 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=sorted(KINDS))
    options = parser.parse_args(arguments)
    counts, num_wrong, seed = Counter[str](), 0, options.seed
    end_s = time.monotonic() + options.minutes * 60
    while time.monotonic() < end_s:
        kind = options.kind or sorted(KINDS)[seed % len(KINDS)]
        try:
            walk(kind, seed, 40, end_s, counts)
        except Exception as error:
            num_wrong += 1
            print(f"--kind {kind} --seed {seed}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            if not isinstance(error, Wrong):
                raise
        seed += 1
    print(json.dumps({"wrong": num_wrong, **dict(sorted(counts.items()))}))
    return bool(num_wrong)


if __name__ == "__main__":
    sys.exit(main())
