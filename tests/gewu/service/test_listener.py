"""Exactly one daemon owns the socket, whatever happens to daemons, descriptors and clients."""

import asyncio
import contextlib
import errno
import json
import logging
import os
import random
import resource
import select
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvloom.gewu.codes import Code
from kvloom.gewu.hosts.fake import FakeSettings
from kvloom.gewu.protocol.frames import PROTOCOL, Frame, encode
from kvloom.gewu.service.connection import Connection
from kvloom.gewu.service.daemon import Daemon
from kvloom.gewu.service.frame_budget import FrameBudgets
from kvloom.gewu.service.listener import Acceptor
from kvloom.gewu.service.settings import Settings
from kvloom.gewu.service.system import _process_bytes
from tests.support.waiting import WAIT_S, until

MIB = 1 << 20
FULL_S = 0.5  # a client that has read no byte for this long
HELLO = encode(Frame("H", PROTOCOL))


def test_of_four_daemons_that_start_at_once_one_serves(start_daemon, tmp_path):
    environ = {**os.environ, "GEWU_SOCKET": str(tmp_path / "gewu.sock"), "GEWU_FAKE_ENGINE": "1"}
    command = [sys.executable, "-m", "kvloom.gewu", "daemon"]
    daemons = [subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    until(lambda: sum(daemon.poll() is None for daemon in daemons) == 1)
    (alive,) = [daemon for daemon in daemons if daemon.poll() is None]
    for daemon in daemons:
        if daemon is not alive:
            _, said = daemon.communicate()
            assert (daemon.returncode, said.count("\n"), "listens on" in said) == (1, 1, True)
    with socket.socket(socket.AF_UNIX) as sock:
        until(lambda: sock.connect_ex(environ["GEWU_SOCKET"]) == 0)
    alive.terminate()
    alive.communicate(timeout=WAIT_S)
    assert not Path(environ["GEWU_SOCKET"]).exists()


def test_what_a_killed_daemon_left_is_taken_over(start_daemon):
    daemon = start_daemon({})
    daemon.kill()
    assert daemon.socket.exists()
    daemon.start()
    assert daemon.status()["sessions"] == []


@pytest.mark.parametrize("kind", ["file", "pipe", "folder"])
def test_what_is_no_socket_is_left_where_it_is(kind, tmp_path):
    path = tmp_path / "mine"
    {"file": path.touch, "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    before = path.stat().st_ino
    environ = {**os.environ, "GEWU_SOCKET": str(path), "GEWU_FAKE_ENGINE": "1"}
    command = [sys.executable, "-m", "kvloom.gewu", "daemon"]
    done = subprocess.run(command, env=environ, stderr=subprocess.PIPE, text=True, timeout=WAIT_S, check=False)
    said = f"gewu: {path}: what is there is no socket; set GEWU_SOCKET to a path of yours\n"
    assert (done.returncode, done.stderr) == (1, said)
    assert path.stat().st_ino == before


def test_a_program_that_listens_and_accepts_nothing_is_not_waited_for(tmp_path):
    path = tmp_path / "gewu.sock"
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(socket.socket(socket.AF_UNIX))
        other.bind(str(path))
        other.listen(0)
        client = stack.enter_context(socket.socket(socket.AF_UNIX))
        client.connect(str(path))  # the queue is full
        environ = {**os.environ, "GEWU_SOCKET": str(path), "GEWU_FAKE_ENGINE": "1"}
        command = [sys.executable, "-m", "kvloom.gewu", "daemon"]
        done = subprocess.run(command, env=environ, stderr=subprocess.PIPE, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stderr) == (1, f"gewu: {path}: a daemon listens on {path} already\n")


def test_at_its_end_a_daemon_removes_its_own_socket_alone(start_daemon):
    daemon = start_daemon({})
    daemon.socket.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(daemon.socket))
        daemon.stop()
        assert daemon.socket.exists()


@pytest.mark.parametrize("removed", [["gewu.sock"], ["gewu.sock", "gewu.sock.lock"]])
def test_a_socket_that_was_removed_is_there_again(start_daemon, start_client, model, removed):
    daemon = start_daemon({})
    first = start_client(daemon)
    session = first.create(model)
    for name in removed:
        (daemon.socket.parent / name).unlink()
    until(daemon.socket.exists)
    assert start_client(daemon).create(model) > 0
    assert first.ask(session, max_tokens=2), "who was connected still is"
    rival = [sys.executable, "-m", "kvloom.gewu", "daemon"]
    environ = {**os.environ, "GEWU_SOCKET": str(daemon.socket), "GEWU_FAKE_ENGINE": "1"}
    done = subprocess.run(rival, env=environ, stderr=subprocess.PIPE, text=True, timeout=WAIT_S)
    assert (done.returncode, "listens on" in done.stderr) == (1, True)
    daemon.stop()
    assert not daemon.socket.exists()


def test_without_descriptors_the_service_waits_and_serves_on(start_daemon, start_client, model, capfd):
    daemon = start_daemon({}, GEWU_IDLE_UNLOAD_S="0.5")
    client = start_client(daemon)
    session = client.create(model)
    pid = daemon.process.pid
    used = len(os.listdir(f"/proc/{pid}/fd"))
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 40, before[1]))
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            other = stack.enter_context(socket.socket(socket.AF_UNIX))
            other.setblocking(False)
            other.connect_ex(str(daemon.socket))
        assert client.ask(session)[-1]["finish_reason"] == "stop"
        assert client.call("create", json.dumps({"model": str(model)}))[0] == Code.NOMEM
        time.sleep(1)  # looks at memory, and unloads
    assert daemon.status()["pid"] == pid
    assert daemon.model()["state"] == "absent"
    said = capfd.readouterr().err.splitlines()
    assert 1 <= len(said) <= 3, "once for each time when none is left"
    assert all("cannot accept more clients (Too many open files)" in line for line in said)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    assert client.ask(client.create(model))[-1]["finish_reason"] == "stop"


class FullListener:
    """A socket whose first accepts find no descriptor."""

    def __init__(self, sock: socket.socket, num_failures: int) -> None:
        self._sock, self._num_failures = sock, num_failures
        self.num_calls = 0
        self.fileno, self.setblocking = sock.fileno, sock.setblocking

    def accept(self) -> tuple[socket.socket, object]:
        self.num_calls += 1
        if self.num_calls <= self._num_failures:
            raise OSError(errno.EMFILE, "Too many open files")
        return self._sock.accept()


def test_accept_does_not_spin_and_says_it_once(tmp_path, caplog):
    async def run() -> int:
        with socket.socket(socket.AF_UNIX) as sock, socket.socket(socket.AF_UNIX) as client:
            sock.bind(str(tmp_path / "sock"))
            sock.listen()
            accepted: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
            full = FullListener(sock, 3)
            acceptor = Acceptor(full, accepted.set_result)
            client.connect(str(tmp_path / "sock"))
            (await accepted).close()
            acceptor.close()
            return full.num_calls

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(run()) == 4
    assert len(caplog.records) == 1


class SocketOf(socket.socket):
    """A connection to a client for which SO_PEERCRED reports `uid`."""

    uid = 0

    def getsockopt(self, *what: int) -> bytes:
        assert what[:2] == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return struct.pack("3i", os.getpid(), self.uid, self.uid)


class ListenerOf(FullListener):
    """A socket that reports `uid` for every client."""

    def __init__(self, sock: socket.socket, uid: int) -> None:
        super().__init__(sock, num_failures=0)
        self._uid = uid

    def accept(self) -> tuple[socket.socket, object]:
        accepted, address = super().accept()
        client = SocketOf(fileno=accepted.detach())
        client.uid = self._uid
        return client, address


@pytest.mark.parametrize(("uid", "is_served"), [(1000, True), (0, True), (1001, False), (65534, False), (1, False)])
def test_the_daemon_serves_its_own_user_and_root_and_nobody_else(uid, is_served, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    async def run() -> bytes:
        path, stop = tmp_path / "sock", asyncio.Event()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(path))
            sock.listen()
            daemon = Daemon(Settings(path, fake=FakeSettings()))
            serving = asyncio.create_task(daemon.serve(ListenerOf(sock, uid), stop))
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(HELLO)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                answer = await asyncio.wait_for(reader.read(64), WAIT_S)
            writer.close()
            stop.set()
            await serving
            return answer

    assert asyncio.run(run()) == (HELLO if is_served else b"")
    refused = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert refused == ([] if is_served else [f"refused process {os.getpid()} of user {uid}"])


def test_half_frames_take_bounded_memory_and_keep_nobody_else_waiting(start_daemon, start_client, model):
    daemon = start_daemon({})
    client = start_client(daemon)
    session = client.create(model)
    pid = Path(f"/proc/{daemon.process.pid}")
    before = _process_bytes(pid)
    half = b"S 1 1 1 0 %d\n" % (16 * MIB) + bytes(16 * MIB - 1)
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(40)]
        unsent = dict.fromkeys(others, memoryview(HELLO + half))
        for other in others:
            other.connect(str(daemon.socket))
            other.setblocking(False)
        while ready := select.select([], [other for other in others if unsent[other]], [], FULL_S)[1]:
            for other in ready:
                with contextlib.suppress(BlockingIOError):
                    unsent[other] = unsent[other][other.send(unsent[other][: 1 << 18]) :]
        assert any(unsent.values()), "it takes up no more, and reads the rest when there is room"
        assert _process_bytes(pid) - before < 100 * MIB
        assert client.ask(session)[-1]["finish_reason"] == "stop"
    until(lambda: _process_bytes(pid) - before < 40 * MIB)


def test_a_frame_that_is_never_whole_ends_its_connection():
    async def run() -> None:
        ours, theirs = socket.socketpair()
        ended: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        connection = Connection(theirs, lambda *_: None, ended.set_result, FrameBudgets(), frame_s=0.01)
        ours.sendall(HELLO + b"C 1 1 0")
        assert await ended is connection
        ours.close()

    asyncio.run(run())


def test_five_hundred_clients_that_vanish_at_any_moment_leave_nothing(start_daemon, start_client, model):
    daemon = start_daemon({"rate": 200})
    client = start_client(daemon)
    session = client.create(model)
    client.ask(session)
    pid, chance = daemon.process.pid, random.Random(3)
    used = len(os.listdir(f"/proc/{pid}/fd"))
    attributes = b'{"model": "%s"}' % str(model).encode()
    chat = b'{"messages": [{"role": "user", "content": "hi"}], "stream": true}'
    frames = [Frame("C", 1, 1, payload=attributes), Frame("S", 2, 1, 1, payload=chat), Frame("A", 0, 1, 1)]
    for _ in range(500):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(daemon.socket))
            fd = os.open(model, os.O_RDONLY)
            data = HELLO + b"".join(encode(frame) for frame in frames)
            cut = chance.randrange(1, len(data) + 1)
            if cut > len(HELLO):
                socket.send_fds(sock, [data[:cut]], [fd])
            else:
                sock.sendall(data[:cut])
            os.close(fd)
            if cut >= len(HELLO) and chance.random() < 0.3:  # which is answered
                sock.recv(64)
    until(lambda: [found["session"] for found in daemon.status()["sessions"]] == [session])
    assert client.ask(session)[-1]["finish_reason"] == "stop"
    until(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= used + 1)
