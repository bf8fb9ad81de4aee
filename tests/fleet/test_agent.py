"""The agent that a fleet starts on a node is started again when it dies, and when it hangs."""

import logging
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from kvloom.contract.errors import ModelError
from kvloom.fleet import agent
from kvloom.pool import doctor
from kvloom.processes import kinds
from tests.support.waiting import WAIT_S, until

POOL_BYTES = 16 << 20


def test_an_agent_that_dies_or_hangs_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("EMS_SOCKET", str(tmp_path / "ems.sock"))
    monkeypatch.setattr(agent, "_LOOK_S", WAIT_S)  # the test looks instead
    silent = replace(kinds.AGENT, silence_s=3 * WAIT_S)
    monkeypatch.setattr(kinds, "AGENT", silent)
    node = agent.NodeAgent(POOL_BYTES)
    try:
        node.look()
        first = node.pid
        os.kill(first or 0, signal.SIGKILL)
        until(lambda: node._program.exit_code is not None)
        with pytest.raises(ModelError, match="the EMS agent was killed by signal 9"):
            node.check()
        with caplog.at_level(logging.ERROR):
            node.look()
        node.check()
        second = node.pid
        os.kill(second or 0, signal.SIGSTOP)
        monkeypatch.setattr(doctor, "_PROBE_S", 0.3)  # a start asks again and again
        for _ in range(3):
            node.look()
            assert node.pid == second
        node.look()
        assert node.pid != second
        node.check()
    finally:
        node.close()
    assert [record.message for record in caplog.records] == [
        "the EMS agent was killed by signal 9; it is started again",
        f"the EMS agent gave no sign of life for {silent.silence_s:g} s; it is started again",
    ]
