"""A daemon ends when it is told to, whatever it does then, and so do its processes, however it ends."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvloom.gewu.hosts.fake import FakeSettings
from kvloom.gewu.protocol.messages import Open
from kvloom.gewu.service.daemon import Daemon
from kvloom.gewu.service.settings import Settings
from kvloom.processes.frames import frame
from tests.support.gewu.daemons import DaemonProcess
from tests.support.waiting import WAIT_S, until


def processes_of(daemon: DaemonProcess) -> list[int]:
    """Of its model, and the one that looks at model files."""
    pid = daemon.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    pids = [int(child) for child in children if b"kvloom.gewu." in Path(f"/proc/{child}/cmdline").read_bytes()]
    assert daemon.model()["pid"] in pids
    assert len(pids) == 2
    return pids


def has_ended(pid: int) -> bool:
    """Its parent may not have waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture
def daemon(start_daemon, start_client, model) -> DaemonProcess:
    """With a loaded model."""
    daemon = start_daemon(None, "--backend", "fake")
    client = start_client(daemon)
    client.ask(client.create(model), max_tokens=3)
    return daemon


def test_whoever_is_told_to_end_while_it_starts_ends(tmp_path):
    async def body() -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "gewu.sock"))
            listener.listen()
            daemon, stop = Daemon(Settings(tmp_path / "gewu.sock", fake=FakeSettings())), asyncio.Event()
            daemon._prober.start = asyncio.Event().wait  # type: ignore[method-assign, assignment]
            asyncio.get_running_loop().call_soon(stop.set)
            await asyncio.wait_for(daemon.serve(listener, stop), WAIT_S)

    asyncio.run(body())


def test_a_second_signal_waits_for_nothing(daemon: DaemonProcess):
    worker = daemon.model()["pid"]
    os.kill(worker, signal.SIGSTOP)  # a daemon that was told once gives it time to end
    daemon.freeze()
    for number in (signal.SIGTERM, signal.SIGINT):
        daemon.process.send_signal(number)
    daemon.thaw()
    assert daemon.process.wait(WAIT_S) == 1
    assert not daemon.socket.exists()
    until(lambda: has_ended(worker))


def test_a_model_that_is_given_up_while_it_is_loaded_ends_without_a_word():
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "kvloom.gewu.worker.main", str(theirs.fileno()), "30"]
    with ours, theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE) as worker:
        theirs.close()
        ours.sendall(frame(msgspec.msgpack.encode(Open("", "fake", 1 << 20, 1024))))
        ours.shutdown(socket.SHUT_RD)  # as a daemon that ends: what the worker sends cannot be sent
        _, errors = worker.communicate(timeout=WAIT_S)
    assert (worker.returncode, errors) == (0, b"")


def test_the_processes_of_a_killed_daemon_end_even_if_they_are_stopped(daemon: DaemonProcess):
    pids = processes_of(daemon)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    daemon.kill()
    until(lambda: all(map(has_ended, pids)))


def test_a_signal_of_the_terminal_reaches_the_daemon_alone(daemon: DaemonProcess):
    pids = processes_of(daemon)
    assert {os.getpgid(pid) for pid in pids} == set(pids)
