"""The pool in C++ gives the same answers as the one in Python, to any calls in any order."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ems.native.build import BLOCKS
from ems.runs import Areas
from kvloom.pool.cluster.native.library import STREAM
from kvloom.pool.storage.budget import Budget
from kvloom.pool.storage.entries import Block, Geometry, NoRoom, Reservation, Written
from kvloom.pool.storage.evict import Lru, S3Fifo
from kvloom.pool.storage.native.library import INDEX, functions
from kvloom.pool.storage.native.pool import NativePool
from kvloom.pool.storage.passing import Announced
from kvloom.pool.storage.pool import Batch, Pool
from kvloom.pool.storage.store import TenantPool
from tests.support.kept import kept

SLAB, TOTAL = 1 << 16, 1 << 18
KEYS = st.integers(0, 40).map(lambda n: bytes([n]) * 32)
LENGTHS = st.sampled_from([100, 5000, 9000, 30000, SLAB + 1])
pytestmark = pytest.mark.usefixtures("native")


def both(is_lru: bool, total: int = TOTAL) -> tuple[TenantPool, NativePool]:
    made: list[Any] = []
    for kind in ("python", "native"):
        budget = Budget(total)
        budget.set_limits("t", 0, total)
        geometry = Geometry(1 << 17, SLAB)
        if kind == "python":
            made.append(TenantPool("t", budget, geometry, 0.25, Lru if is_lru else S3Fifo))
        else:
            made.append(NativePool("t", budget, geometry, 0.25, (functions(), is_lru)))
    return made[0], made[1]


def named(found: object) -> object:
    """The result for a key, without its location in memory."""
    if isinstance(found, NoRoom):
        return found.status
    return ("memory" if isinstance(found, Reservation) else "block", found.key, found.length, found.is_rcache)


class SideBySideMachine(RuleBasedStateMachine):
    """Both pools get the same calls; their answers, contents, evictions and counts agree after each step."""

    @initialize(is_lru=st.booleans())
    def open(self, is_lru: bool) -> None:
        self.pools: tuple[Pool, Pool] = both(is_lru)
        self.pins: list[list[list[Block]]] = [[], []]
        self.reserved: list[list[Reservation]] = [[], []]
        self.limit = TOTAL

    def ask(self, call: Any) -> Any:
        """The pools' answer, which must be the same."""
        python, native = (call(pool) for pool in self.pools)
        assert python == native
        return python

    @rule(
        keys=st.lists(KEYS, min_size=1, max_size=12),
        lengths=st.lists(LENGTHS, min_size=12, max_size=12),
        is_alike=st.booleans(),
        parent=KEYS | st.just(b"") | st.none(),
        copies=st.sets(st.integers(0, 11), max_size=3),
        changed=st.booleans(),
        is_held=st.booleans(),
    )
    def save(self, keys, lengths, is_alike, parent, copies, changed, is_held) -> None:
        lengths = [lengths[0 if is_alike else i] for i in range(len(keys))]
        offsets = [sum(lengths[:i]) for i in range(len(keys))]
        arena = np.arange(sum(lengths), dtype=np.uint8) + np.uint8(changed)
        for key, offset in zip(keys, offsets, strict=True):
            arena[offset] = key[0]
        areas = Areas({0: arena}, [0] * len(keys), offsets, lengths)
        batch = Batch(keys, areas, parent, [i in copies for i in range(len(keys))])
        done = [pool.save(batch) for pool in self.pools]
        assert done[0].statuses == done[1].statuses
        assert done[0].num_stored == done[1].num_stored
        assert done[0].refused == done[1].refused
        found = [saved.held.blocks() for saved in done]
        for pool, blocks in zip(self.pools, found, strict=True):
            for block in blocks:
                assert xxhash.xxh3_128_digest(pool.view(block.offset, block.length).data) == block.checksum
        assert list(map(named, found[0])) == list(map(named, found[1]))
        assert [block.parent_key for block in found[0]] == [block.parent_key for block in found[1]]
        self.hold(found, is_held)

    def hold(self, found: list[list[Block]], is_held: bool) -> None:
        for pool, pins, blocks in zip(self.pools, self.pins, found, strict=True):
            if is_held:
                pins.append(blocks)
            else:
                pool.unpin(blocks)

    @rule(keys=st.lists(KEYS, max_size=4), is_prefix=st.booleans(), is_held=st.booleans())
    def pin(self, keys, is_prefix, is_held) -> None:
        found = []
        for pool in self.pools:
            located = pool.pin_prefix(keys) if is_prefix else pool.pin_each(keys)
            found.append([block for block in located if block is not None])
        assert list(map(named, found[0])) == list(map(named, found[1]))
        self.hold(found, is_held)

    @rule(number=st.integers(0, 9))
    def unpin(self, number) -> None:
        for pool, pins in zip(self.pools, self.pins, strict=True):
            if pins:
                pool.unpin(pins.pop(number % len(pins)))

    @rule(keys=st.lists(KEYS, min_size=1, max_size=3), length=LENGTHS, is_copy=st.booleans())
    def begin(self, keys, length, is_copy) -> None:
        found = [pool.begin_all(keys, [length] * len(keys), [is_copy] * len(keys)) for pool in self.pools]
        assert list(map(named, found[0])) == list(map(named, found[1]))
        for pool, reserved, each in zip(self.pools, self.reserved, found, strict=True):
            reserved += [begun for begun in each if isinstance(begun, Reservation)]
            pool.unpin([begun for begun in each if not isinstance(begun, Reservation | NoRoom)])

    @rule(parent=KEYS | st.just(b""), is_kept=st.booleans())
    def end(self, parent, is_kept) -> None:
        if self.reserved[0] and is_kept:
            done = []
            for pool, reserved in zip(self.pools, self.reserved, strict=True):
                begun = reserved.pop()
                pool.view(begun.offset, begun.length)[:] = 7
                checksum = xxhash.xxh3_128_digest(bytes([7]) * begun.length)
                status, block = pool.publish(Written(begun, checksum, parent))
                done.append((status, named(block), block.parent_key))
                pool.unpin([block])
            assert done[0] == done[1]
        elif self.reserved[0]:
            for pool, reserved in zip(self.pools, self.reserved, strict=True):
                pool.abandon(reserved.pop())

    @rule(
        keys=st.lists(KEYS, min_size=1, max_size=12),
        lengths=st.lists(LENGTHS, min_size=12, max_size=12),
        parents=st.lists(KEYS, min_size=12, max_size=12) | st.none(),
        damaged=st.sets(st.integers(0, 11), max_size=2) | st.none(),
        is_copy=st.booleans(),
        is_held=st.booleans(),
    )
    def arrive(self, keys, lengths, parents, damaged, is_copy, is_held) -> None:
        """Blocks arrive from another node. damaged: indices of blocks with wrong bytes; None: the connection breaks."""
        lengths, data = lengths[: len(keys)], [bytes([key[0]]) * n for key, n in zip(keys, lengths, strict=False)]
        sums, before = list(map(xxhash.xxh3_128_digest, data)), b"".join(parents or [])[: 32 * len(keys)]
        arrivals = [pool.arrive(Announced(keys, lengths, b"".join(sums), before, is_copy)) for pool in self.pools]
        wanted = [[view is not None for view in arrival.spans.views()] for arrival in arrivals]
        assert wanted[0] == wanted[1]
        if damaged is None:
            for arrival in arrivals:
                arrival.give_up()
            return
        for i in damaged & set(range(len(keys))):
            sums[i] = bytes(16)
        found = []
        for arrival in arrivals:
            for view, each in zip(arrival.spans.views(), data, strict=True):
                if view is not None:
                    view[:] = np.frombuffer(each, np.uint8)
            found.append(arrival.settle(np.frombuffer(b"".join(sums), np.uint8).reshape(-1, 16)))
        assert found[0].statuses == found[1].statuses
        assert found[0].lengths == found[1].lengths == [block.length for block in found[0].held.blocks()]
        blocks = [arrived.held.blocks() for arrived in found]
        assert list(map(named, blocks[0])) == list(map(named, blocks[1]))
        assert [block.is_home for block in blocks[0]] == [block.is_home for block in blocks[1]]
        self.hold(blocks, is_held)

    @rule(keys=st.lists(KEYS, max_size=6))
    def offer(self, keys) -> None:
        said = []
        for pool in self.pools:
            offered = pool.offer(keys)
            data = [None if view is None else bytes(view) for view in offered.spans.views()]
            said.append((offered.lengths, offered.sums, data))
            offered.release()
        assert said[0] == said[1]

    @rule(size=st.integers(1, 1 << 16))
    def evict(self, size) -> None:
        self.ask(lambda pool: pool.evict(size))

    @rule(length=st.sampled_from([4096, 8192, 30720]), count=st.integers(1, 20))
    def make_room_ahead(self, length, count) -> None:
        while self.ask(lambda pool: pool.make_room_ahead(length, count)):
            pass

    @rule(pages=st.integers(8, TOTAL // 4096))
    def change_the_quota(self, pages) -> None:
        for pool in self.pools:
            pool._budget.set_limits("t", 0, pages * 4096)
            for size in pool._budget.excess().values():
                pool.shrink(size)

    @rule(number=st.integers(0, 9))
    def damage(self, number) -> None:
        """A byte of a pinned block changes in memory."""
        said = []
        for pool, pins in zip(self.pools, self.pins, strict=True):
            blocks = [block for each in pins for block in each]
            if blocks:
                block = blocks[number % len(blocks)]
                pool.view(block.offset, block.length)[0] ^= 1
                said.append(pool.distrust(block))
        assert len(set(said)) <= 1

    @rule(keys=st.sets(KEYS), count=st.integers(1, 100))
    def miss(self, keys: set[bytes], count: int) -> None:
        self.ask(lambda pool: [pool.missed(key, count) for key in pool.missing(sorted(keys))])

    @invariant()
    def they_keep_the_same(self) -> None:
        every = [bytes([n]) * 32 for n in range(41)]
        self.ask(lambda pool: pool.block_keys())
        self.ask(lambda pool: pool.usage())
        self.ask(lambda pool: Counter(pool.counts))
        self.ask(lambda pool: pool.missing(every))
        self.ask(lambda pool: pool.count_prefix(every))
        self.ask(lambda pool: pool.num_given_back)
        self.ask(lambda pool: pool._budget.has_room("t"))
        for pool in self.pools:
            pool.check()

    @invariant()
    def what_is_pinned_is_the_same(self) -> None:
        described = [
            [(named(block), block.pins, block.parent_key, block.is_home) for each in pins for block in each]
            for pins in self.pins
        ]
        assert described[0] == described[1]

    def teardown(self) -> None:
        for pool in getattr(self, "pools", ()):
            pool.close()


SideBySideMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestSideBySide = SideBySideMachine.TestCase


def test_a_table_finds_all_that_it_was_given():
    """Buckets are split one by one as blocks are added: no block is lost, and no evicted one is found."""
    _python, native = both(is_lru=False, total=1 << 24)
    keys = [number.to_bytes(32, "big") for number in range(3000)]
    for start in range(0, 3000, 500):
        found = native.begin_all(keys[start : start + 500], [100] * 500, [False] * 500)
        written = [Written(begun, bytes(16)) for begun in found if isinstance(begun, Reservation)]
        native.unpin([block for _status, block in native.publish_all(written)])
    assert native.missing(keys) == []
    assert native.block_keys() == keys
    assert native.evict(1000 * 4096) == 1000 * 4096
    gone = native.missing(keys)
    assert len(gone) == 1000
    assert native.count_prefix([key for key in keys if key not in set(gone)]) == 2000
    native.check()
    native.close()


def lay_compiler(folder: Path, script: str) -> None:
    folder.mkdir()
    (folder / "c++").write_text(script)
    (folder / "c++").chmod(0o755)


@pytest.mark.parametrize(("runtime", "kinds"), [("asan", "address,undefined"), ("tsan", "thread")])
def test_the_libraries_are_clean_under_the_compilers_sanitizers(runtime, kinds, monkeypatch):
    said = subprocess.run(["c++", f"-print-file-name=lib{runtime}.so"], capture_output=True, text=True, check=False)
    library = said.stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip(f"the compiler has no lib{runtime}")
    script = f'#!/bin/sh\nexec c++ -g1 -fsanitize={kinds} -fno-sanitize-recover=all -Werror "$@" -O0\n'
    names = [each.path().name.encode() for each in (BLOCKS, INDEX, STREAM)]  # these change with the sources
    cache = kept([script.encode(), *names], "cache", lambda folder: lay_compiler(folder, script))
    monkeypatch.setenv("CXX", str(cache / "c++"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert {each.path().is_relative_to(cache) for each in (BLOCKS, INDEX, STREAM)} == {True}
    options = {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1"}
    command = [sys.executable, "-m", "tests.support.pool.storm"]
    done = subprocess.run(command, env={**os.environ, **options}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
