"""Pressure triggers. TCP's urgent data stands in for the kernel's event: both are priority events of poll."""

import os
import queue
import socket
from pathlib import Path

import pytest

from kvloom.gewu.service.psi import Watcher, open_triggers
from tests.support.waiting import WAIT_S

PRESSURE = Path("/proc/pressure/memory")


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_a_trigger_that_fires_names_its_level(pair):
    ours, theirs = pair
    fired: queue.Queue[int] = queue.Queue()
    watcher = Watcher({os.dup(theirs.fileno()): 2}, fired.put)
    assert fired.empty()
    ours.send(b"!", socket.MSG_OOB)
    assert fired.get(timeout=WAIT_S) == 2
    watcher.close()


def test_a_file_that_cannot_fire_is_left_as_it_is(tmp_path):
    file = tmp_path / "memory"
    file.write_text("some avg10=0 total=0\n")
    assert open_triggers(file) == {}
    assert open_triggers(tmp_path / "none") == {}
    assert file.read_text() == "some avg10=0 total=0\n"


def may_trigger() -> bool:
    try:
        with PRESSURE.open("r+b", buffering=0) as file:
            file.write(b"some 200000 2000000\0")
    except OSError:
        return False
    return True


@pytest.mark.skipif(not may_trigger(), reason="the kernel permits no pressure triggers here")
def test_the_kernel_takes_both_triggers():
    triggers = open_triggers(PRESSURE)
    Watcher(triggers, lambda level: None).close()
    assert sorted(triggers.values()) == [1, 2]
