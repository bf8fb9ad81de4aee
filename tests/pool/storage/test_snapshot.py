"""Snapshots: an agent that ended normally has its blocks again after its next start; damage costs only blocks."""

import itertools
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from ems.common.memory import HUGE_PAGE_BYTES
from ems.runs import address_of
from kvloom.pool import snapshot
from kvloom.pool.auth import new_credential
from kvloom.pool.node import Node
from kvloom.pool.snapshot import Snapshots
from kvloom.pool.storage.segments import SharedMemory, huge_pages_in_use
from tests.support.pool.agents import SECRET, new_kv, running_agent, session, slots_of
from tests.support.pool.faults import AgentProcess, Oracle
from tests.support.waiting import WAIT_S, until

HASHES = list(range(1, 13))


@pytest.fixture
def saved(tmp_path) -> Path:
    """The snapshot folder of an agent that held the blocks of HASHES when it ended."""
    oracle = Oracle()
    with running_agent(snapshot_dir=tmp_path / "kept") as agent, session(agent.config.socket, oracle.kv) as cc:
        assert oracle.save(cc, HASHES) == len(HASHES)
    return tmp_path / "kept"


def blocks_after(folder: Path, **changes: object) -> int:
    """The number of prefix blocks that the next agent loads; their bytes are compared."""
    oracle = Oracle()
    with running_agent(snapshot_dir=folder, **changes) as agent, session(agent.config.socket, oracle.kv) as cc:
        until(lambda: not list(folder.glob("*.ems")))
        return oracle.load(cc, HASHES)


def test_blocks_survive_an_orderly_restart_again_and_again(saved):
    assert [blocks_after(saved) for _ in range(3)] == [len(HASHES)] * 3


def test_the_file_is_its_owners_and_is_gone_once_it_was_read(saved):
    (file,) = saved.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with running_agent(snapshot_dir=saved):
        until(lambda: not list(saved.iterdir()))


def test_a_flipped_bit_costs_its_block(saved):
    (file,) = saved.iterdir()
    data = bytearray(file.read_bytes())
    truth = Oracle().truth(HASHES[4]).tobytes()
    data[data.index(truth) + 77] ^= 4
    file.write_bytes(data)
    assert blocks_after(saved) == 4


def test_blocks_that_changed_places_are_nobodys(saved):
    (file,) = saved.iterdir()
    data = bytearray(file.read_bytes())
    one, other = (data.index(Oracle().truth(HASHES[i]).tobytes()) for i in (4, 7))
    size = 16 + 4 + 1 + 16384  # seal, length, kind and bytes: all of a record but its names
    first, second = slice(one - 21, one - 21 + size), slice(other - 21, other - 21 + size)
    data[first], data[second] = data[second], data[first]
    file.write_bytes(data)
    assert blocks_after(saved) == 4


def test_a_file_of_an_earlier_version_is_not_used(saved, caplog):
    (file,) = saved.iterdir()
    file.write_bytes(b"EMSSNAP1" + file.read_bytes()[8:])
    assert blocks_after(saved) == 0
    assert "an earlier version wrote it" in caplog.text


@pytest.mark.parametrize("keep", [0, 10, 60, 120, 20_000, 50_000])
def test_a_cut_file_costs_what_is_behind_the_cut(saved, keep):
    (file,) = saved.iterdir()
    file.write_bytes(file.read_bytes()[:keep])
    assert blocks_after(saved) == max(0, (keep - 49) // (16384 + 85))


def test_another_cluster_secret_finds_nothing(saved):
    assert blocks_after(saved, secret=SECRET) == 0


def test_what_does_not_fit_any_more_is_left_out(saved):
    assert blocks_after(saved, pool_bytes=64 << 10, segment_bytes=64 << 10, slab_bytes=64 << 10) == 4


@pytest.mark.parametrize("num_read", [0, 1, 5, len(HASHES)])
def test_what_was_not_read_yet_when_the_agent_ends_again_is_kept(saved, monkeypatch, num_read):
    may_end, restore = threading.Event(), Snapshots.restore
    readers: list[Snapshots] = []
    publish, count = snapshot._publish, itertools.count(1)

    def published(*block: Any) -> bool:
        done = publish(*block)
        if next(count) == num_read:
            may_end.set()
            until(lambda: readers[0]._is_closing)
        return done

    def restored(self: Snapshots, node: Node) -> int:
        readers.append(self)
        if num_read == 0:
            may_end.set()
            until(lambda: self._is_closing)
        return restore(self, node)

    with monkeypatch.context() as patched:
        patched.setattr(snapshot, "_publish", published)
        patched.setattr(Snapshots, "restore", restored)
        with running_agent(snapshot_dir=saved):
            assert may_end.wait(WAIT_S)
    assert blocks_after(saved) == len(HASHES)


def test_a_killed_agent_leaves_no_snapshot(tmp_path):
    oracle = Oracle()
    path, kept = tmp_path / "a.sock", tmp_path / "kept"
    with AgentProcess(path, f"--snapshot-dir={kept}") as agent, session(path, oracle.kv) as cc:
        oracle.save(cc, HASHES)
        agent.kill()
        agent.start()
        assert oracle.load(cc, HASHES) == 0


def test_tenants_stay_apart(tmp_path):
    credentials = tmp_path / "credentials.json"
    key_a, key_b = "a" * 32, "b" * 32
    both = [new_credential("a", "tenant-a", key_a), new_credential("b", "tenant-b", key_b)]
    credentials.write_text(json.dumps([each.to_json() for each in both]))
    config = {"credentials": credentials, "is_open": False, "secret": SECRET, "snapshot_dir": tmp_path / "kept"}
    oracle = Oracle()
    with running_agent(**config) as agent:
        with session(agent.config.socket, oracle.kv, access_id="a", access_key=key_a) as cc:
            oracle.save(cc, HASHES)
        with session(agent.config.socket, oracle.kv, access_id="b", access_key=key_b) as cc:
            oracle.save(cc, HASHES[:5])
    with running_agent(**config) as agent:
        until(lambda: not list((tmp_path / "kept").glob("*.ems")))
        for name, key, count in (("a", key_a, len(HASHES)), ("b", key_b, 5)):
            with session(agent.config.socket, oracle.kv, access_id=name, access_key=key) as cc:
                assert oracle.load(cc, HASHES) == count


def test_a_folder_that_cannot_be_written_to_ends_the_start(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", Path("/proc/kept")):
        with pytest.raises(ValueError, match=f"^--snapshot-dir: {folder} cannot be written to: "):
            Snapshots(folder)


def test_what_is_in_the_way_of_a_file_costs_no_other(saved, caplog):
    (file,) = saved.iterdir()
    (saved / "0.ems").mkdir()
    os.mkfifo(saved / "1.ems")
    file.with_suffix(".new").mkdir()
    with running_agent(snapshot_dir=saved) as agent:
        until(lambda: not file.exists())
        assert agent.node.pool("default").usage()["blocks"] == len(HASHES)
    texts = [record.getMessage() for record in caplog.records]
    assert [text.startswith("the snapshot ") for text in texts] == [True] * 2, texts
    assert not file.exists(), "what is in the way of the next one is still there"


def test_huge_pages_or_ordinary_ones_hold_the_same_bytes():
    memory = SharedMemory("test", HUGE_PAGE_BYTES, is_sealed=True, has_huge_pages=True)
    memory.data[:] = 7
    assert os.pread(memory.fd, 3, HUGE_PAGE_BYTES - 3) == b"\7\7\7"
    assert memory.is_reserved == huge_pages_in_use(is_prefaulted=False).startswith("reserved")
    memory.close()


def provided(memory: SharedMemory) -> int:
    """Bytes of memory that the kernel has allocated."""
    return os.fstat(memory.fd).st_blocks * 512


def test_memory_that_is_provided_ahead_keeps_its_bytes_and_is_no_more_than_was_asked_for():
    page, size = HUGE_PAGE_BYTES, 4 * HUGE_PAGE_BYTES
    memory = SharedMemory("test", size, is_sealed=True)
    memory.data[page + 5] = 7
    assert memory.prefault(page - 4096, 2 * page)
    assert provided(memory) == 2 * page
    assert memory.data[page + 5] == 7
    assert memory.prefault(0, size)
    assert provided(memory) == size
    assert memory.data.sum() == 7, "a byte has changed"
    assert (huge_pages_of(memory) == size) == memory.is_merged
    memory.close()


def huge_pages_of(memory: SharedMemory) -> int:
    """Bytes of the mapping in huge pages."""
    start = f"{address_of(memory.data):x}-"
    lines = Path("/proc/self/smaps").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(start))
    found = next(line for line in lines[first:] if line.startswith("ShmemPmdMapped:"))
    return int(found.split()[1]) * 1024


def test_an_agent_with_huge_pages_serves(tmp_path):
    with running_agent(has_huge_pages=True) as agent, session(agent.config.socket, kv := new_kv()) as cc:
        before = kv[0][0][:2].clone()
        assert cc.save(slots_of(0, 1), [1, 2], [4, 4]).success == 2
        kv[0][0][:2] = 0
        assert cc.load(slots_of(0, 1), [1, 2], [4, 4]).success == 2
        assert (kv[0][0][:2] == before).all()
