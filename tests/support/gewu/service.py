"""A scripted Gewu service, and a build of libqos.so whose timeouts a test can set."""

import functools
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from kvloom.gewu.build import compile_library
from kvloom.gewu.codes import Code
from kvloom.gewu.protocol.frames import PROTOCOL, Frame, FrameDecoder, encode
from tests.support.gewu.daemons import PATIENCE
from tests.support.waiting import WAIT_S


class Peer:
    """One client, as a script sees it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fds: list[int] = []  # received so far
        self.done = threading.Event()  # the service ends
        self._decoder = FrameDecoder()

    def receive(self) -> Frame | None:
        """The next frame; None when the client has gone."""
        while (frame := self._decoder.next_frame()) is None:
            try:
                data, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 4)
            except OSError:
                return None
            self.fds += fds
            if not data:
                return None
            self._decoder.feed(data)
        return frame

    def expect(self, op: str) -> Frame:
        frame = self.receive()
        assert frame is not None
        assert frame.op == op
        return frame

    def send(self, op: str, *numbers: int, payload: bytes = b"") -> None:
        self.sock.sendall(encode(Frame(op, *numbers, payload=payload)))

    def greet(self) -> None:
        self.expect("H")
        self.send("H", PROTOCOL)

    def create(self) -> Frame:
        """Answers a hello and a Create; returns the Create."""
        self.greet()
        frame = self.expect("C")
        self.send("r", frame.a, Code.OK, frame.b)
        return frame

    def rest(self) -> list[str]:
        """The remaining operations, until the client disconnects."""
        found = []
        while (frame := self.receive()) is not None:
            found.append(frame.op)
        return found


class Service:
    """Listens on `path`; runs `script` in a thread for each client. `close` raises the exception of a script."""

    def __init__(self, path: Path, script: Callable[[Peer], None], **environ: str) -> None:
        self.environ = {**os.environ, "GEWU_SOCKET": str(path), **environ}
        self._script = script
        self._problems: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self._peers: list[Peer] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._start(self._accept)

    def join(self) -> None:
        """Waits until the scripts have ended."""
        for thread in self._threads[1:]:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        if self._problems:
            raise self._problems[0]

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in self._peers:
            peer.done.set()
            peer.sock.close()
            for fd in peer.fds:
                os.close(fd)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._peers.append(Peer(sock))
            self._start(functools.partial(self._serve, self._peers[-1]))

    def _serve(self, peer: Peer) -> None:
        try:
            self._script(peer)
        except (AssertionError, OSError) as problem:
            self._problems.append(problem)

    def _start(self, run: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()


@functools.cache
def library_of_any_patience(folder: Path) -> Path:
    """libqos.so whose calls wait as long as the app sets with `patience`, see tests/gewu/client.py."""
    path = folder / "libqos.so.1"
    compile_library(path, PATIENCE)
    return path
