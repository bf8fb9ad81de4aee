"""The pool's memory as a client maps it: what nobody uses any more is let go of, whatever the client does next."""

from pathlib import Path

from ems import CcResult
from ems.transport import SegmentMaps
from tests.support.pool import new_kv, session, slots_of
from tests.support.pool_faults import AgentProcess
from tests.support.waiting import until


def num_mapped() -> int:
    """Segments of pools in this process's memory."""
    return Path("/proc/self/maps").read_text().count("memfd:ems-pool")


def test_a_client_that_loads_no_more_lets_go_of_what_it_mapped(tmp_path):
    before = num_mapped()
    with AgentProcess(tmp_path / "ems.sock") as agent, session(agent.socket, new_kv()) as cc:
        cc._links._maps = SegmentMaps(idle_s=0.01)
        for number in (1, 2):
            assert cc.save(slots_of(0), [number], [4]) == CcResult(1, 1)
            assert cc.load(slots_of(1), [number], [4]) == CcResult(1, 1)
            until(lambda: num_mapped() == before)


def test_mappings_go_when_the_session_ends(tmp_path):
    before = num_mapped()
    with AgentProcess(tmp_path / "ems.sock") as agent:
        with session(agent.socket, new_kv()) as cc:
            assert cc.save(slots_of(0), [1], [4]) == CcResult(1, 1)
            assert cc.load(slots_of(1), [1], [4]) == CcResult(1, 1)
            assert num_mapped() == before + 1
        until(lambda: num_mapped() == before)
