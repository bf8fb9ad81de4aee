"""The pool's memory as a client maps it: unused segments are unmapped, whatever the client does next."""

import os
from pathlib import Path

import pytest

from ems import CcResult
from ems.common.memory import HUGE_PAGE_BYTES, map_shared
from ems.runs import address_of
from ems.transport import SegmentMaps
from tests.support.pool.agents import new_kv, session, slots_of
from tests.support.pool.faults import AgentProcess
from tests.support.waiting import until


def mapped() -> set[str]:
    """The pool segments that this process maps, by their files' numbers; another test's may still come and go."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:ems-pool" in line}


def test_a_client_that_loads_no_more_lets_go_of_what_it_mapped(tmp_path):
    before = mapped()
    with AgentProcess(tmp_path / "ems.sock") as agent, session(agent.socket, new_kv()) as cc:
        cc._links._maps = SegmentMaps(idle_s=0.01)
        for number in (1, 2):
            assert cc.save(slots_of(0), [number], [4]) == CcResult(1, 1)
            assert cc.load(slots_of(1), [number], [4]) == CcResult(1, 1)
            until(lambda: not mapped() - before)


def test_shared_memory_is_mapped_where_the_kernel_can_map_huge_pages():
    fd, size = os.memfd_create("test-mapping"), HUGE_PAGE_BYTES + 4096
    os.ftruncate(fd, size)
    written, read = map_shared(fd, size, is_writable=True), map_shared(fd, size, is_writable=False)
    written[-3:] = 1, 2, 3
    assert read[-3:].tolist() == [1, 2, 3]
    assert not address_of(written) % HUGE_PAGE_BYTES
    assert not address_of(read) % HUGE_PAGE_BYTES
    with pytest.raises(ValueError, match="read-only"):
        read[0] = 1
    part = written[5:9]
    del written, read
    part[:] = 9
    assert os.pread(fd, 4, 5) == b"\t" * 4, "a part keeps the whole"
    del part
    assert "test-mapping" not in Path("/proc/self/maps").read_text()
    os.close(fd)


def test_a_file_that_is_too_short_is_not_mapped():
    fd = os.memfd_create("test-mapping")
    os.ftruncate(fd, 4096)
    with pytest.raises(OSError, match="a file of 4096 bytes is to be mapped as 8192"):
        map_shared(fd, 8192, is_writable=False)
    os.close(fd)


def test_mappings_go_when_the_session_ends(tmp_path):
    before = mapped()
    with AgentProcess(tmp_path / "ems.sock") as agent:
        with session(agent.socket, new_kv()) as cc:
            assert cc.save(slots_of(0), [1], [4]) == CcResult(1, 1)
            assert cc.load(slots_of(1), [1], [4]) == CcResult(1, 1)
            assert len(mapped() - before) == 1
        until(lambda: not mapped() - before)
