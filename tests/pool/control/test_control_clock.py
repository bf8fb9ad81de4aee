"""Ends of access keys, whatever the clock of the control plane's machine does."""

from contextlib import closing

from kvloom.pool.control.state import ControlState
from tests.support.pool.control import Clock


def test_a_clock_that_is_set_back_gives_an_old_key_no_more_time(tmp_path):
    wall, steady = Clock(), Clock()
    path = tmp_path / "control.db"
    with closing(ControlState(path, wall, steady)) as state:
        state.issue("a", "t")
        state.rotate("a", 60)
        wall.now_s -= 3600
        steady.now_s += 59
        assert len(state.credentials()[0]["verifiers"]) == 2
        steady.now_s += 2
        assert len(state.credentials()[0]["verifiers"]) == 1
        state.rotate("a", 60)
        steady.now_s += 30
        assert len(state.credentials()[0]["verifiers"]) == 2
    with closing(ControlState(path, wall, steady)) as state:
        assert len(state.credentials()[0]["verifiers"]) == 2
        steady.now_s += 31
        assert len(state.credentials()[0]["verifiers"]) == 1, "nor where the control plane was started again"
