"""Child processes ignore signals sent to the process group, from their first moment on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvloom.processes.child import signals_held_at_start
from tests.support.processes import CLI, facts_of
from tests.support.waiting import WAIT_S, until

CHILD = """
import signal, sys
print("up", flush=True)
sys.stdin.readline()
from kvloom.processes.inside import leave_signals_to_the_parent
leave_signals_to_the_parent()
print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
"""


def test_a_signal_that_comes_before_it_is_ignored_is_ignored_too():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with signals_held_at_start():
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        for number in (signal.SIGINT, signal.SIGTERM):
            child.send_signal(number)
        out, _ = child.communicate("\n", timeout=WAIT_S)
    assert (child.returncode, out) == (0, "[]\n")  # none stays blocked, so its own children block none


@pytest.mark.usefixtures("really_started")
def test_a_model_process_heeds_no_ctrl_c_while_it_imports():
    """In a terminal, Ctrl-C reaches the whole process group: the server ends, no model process prints a traceback."""
    command = [*CLI, "serve", "--backend", "fake", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True) as server:
        until(lambda: model_processes(server.pid))
        (rank,) = model_processes(server.pid)
        assert unheeded(rank) >= {signal.SIGINT, signal.SIGTERM}
        os.killpg(server.pid, signal.SIGINT)
        out, _ = server.communicate(timeout=WAIT_S)
    assert b"KeyboardInterrupt" not in out


def model_processes(server: int) -> list[int]:
    found = facts_of(server, "pid", "cmdline")
    return [process["pid"] for process in found if "kvloom.rank.main" in (process["cmdline"] or ())]


def unheeded(process: int) -> set[int]:
    """Signals that the process ignores or blocks."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigBlk", "SigIgn"))]
    return {number for number in range(1, 32) if any(mask >> number - 1 & 1 for mask in masks)}
