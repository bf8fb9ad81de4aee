"""A proxy between two nodes that delays, cuts or damages answers as networks and dying machines do."""

import random
import socket
import threading
from contextlib import suppress


class NodeProxy:
    """Passes bytes between nodes. `is_flipping`: flips one random bit of every answer."""

    def __init__(self, port: int) -> None:
        """port: of the called node, on loopback."""
        self._target = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.is_flipping = False
        self._left: int | None = None
        self._lock = threading.Lock()
        self._is_cut = False
        self._went_on = threading.Event()
        self._chance = random.Random(4)
        self._sockets = [self._server]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def limit(self, num_bytes: int, is_cut: bool) -> None:
        """After this many more bytes of answers the connection is cut, as are later ones; or everything stalls."""
        self._is_cut, self._left = is_cut, num_bytes
        self._went_on.clear()

    def go_on(self) -> None:
        """Passes everything again."""
        self._left = None
        self._went_on.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [near, far]
                for source, sink, answers in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._pass, args=(source, sink, answers), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := bytearray(source.recv(65536)):
                if answers and self.is_flipping:
                    data[self._chance.randrange(len(data))] ^= 1 << self._chance.randrange(8)
                passed = self._allowed(len(data)) if answers else len(data)
                sink.sendall(data[:passed])
                if passed < len(data):
                    if self._is_cut:
                        break
                    self._went_on.wait()
                    sink.sendall(data[passed:])
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def _allowed(self, size: int) -> int:
        with self._lock:
            if self._left is None:
                return size
            passed = min(self._left, size)
            self._left -= passed
            return passed

    def close(self) -> None:
        self.go_on()
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self._thread.join()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _address = listener.accept()
    return near, far
