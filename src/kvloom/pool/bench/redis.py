"""Redis or Valkey beside the pool in a bench run, when a server of theirs is installed: MSET and MGET."""

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
SERVERS = ("valkey-server", "redis-server")
_START_S = 5.0
_POLL_S = 0.01
_MAX_PARTS = 1024  # of a system call


def find_server() -> str | None:
    """Path of an installed server, or None."""
    return next(filter(None, map(shutil.which, SERVERS)), None)


class RedisClient:
    """Just enough of RESP2 for batches of blocks; copies straight out of and into arrays."""

    def __init__(self, path: Path) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(30.0)
        self._sock.connect(str(path))
        self._buffer: Bytes = np.zeros(0, np.uint8)

    def save(self, keys: list[bytes], data: Bytes, size: int) -> None:
        """MSET of all blocks, which are sent from where they lie, as its own clients do with long values."""
        parts: list[bytes | memoryview] = [b"*%d\r\n$4\r\nMSET\r\n" % (1 + 2 * len(keys))]
        for i, key in enumerate(keys):
            parts += [b"$%d\r\n%b\r\n$%d\r\n" % (len(key), key, size), data[i * size : (i + 1) * size].data, b"\r\n"]
        self._send(parts)
        if self._receive(5).tobytes() != b"+OK\r\n":
            raise RuntimeError("a block was not stored")

    def load(self, keys: list[bytes], target: Bytes, size: int) -> None:
        """MGET of all blocks; all must be there."""
        head = b"*%d\r\n$4\r\nMGET\r\n" % (1 + len(keys))
        self._sock.sendall(head + b"".join(b"$%d\r\n%b\r\n" % (len(key), key) for key in keys))
        heads = b"*%d\r\n" % len(keys), b"$%d\r\n" % size
        answer = self._receive(len(heads[0]) + len(keys) * (len(heads[1]) + size + 2))
        position = len(heads[0])
        for i in range(len(keys)):
            start = position + len(heads[1])
            assert answer[position:start].tobytes() == heads[1], "a block is missing"
            target[i * size : (i + 1) * size] = answer[start : start + size]
            position = start + size + 2

    def _send(self, parts: list[bytes | memoryview]) -> None:
        first = 0
        while first < len(parts):
            count = self._sock.sendmsg(parts[first : first + _MAX_PARTS])
            while count and count >= len(parts[first]):
                count -= len(parts[first])
                first += 1
            if count:
                parts[first] = memoryview(parts[first])[count:]

    def _receive(self, size: int) -> Bytes:
        """Exactly `size` bytes, in memory that is reused."""
        if len(self._buffer) < size:
            self._buffer = np.zeros(size, np.uint8)
        view, position = self._buffer[:size].data, 0
        while position < size:
            count = self._sock.recv_into(view[position:])
            if count == 0:
                raise ConnectionResetError("the server closed the connection")
            position += count
        return self._buffer[:size]

    def close(self) -> None:
        self._sock.close()


@contextlib.contextmanager
def private_server(command: str, pool_bytes: int) -> Iterator[Path]:
    """A server without persistence on a socket of its own. Raises TimeoutError when it does not start."""
    with tempfile.TemporaryDirectory(prefix="ems-bench-") as folder:
        path = Path(folder) / "redis.sock"
        arguments = ["--port", "0", "--unixsocket", str(path), "--save", "", "--dir", folder]
        arguments += ["--maxmemory", str(pool_bytes), "--maxmemory-policy", "allkeys-lru"]
        with subprocess.Popen([command, *arguments], stdout=subprocess.DEVNULL) as process:
            try:
                limit_s = time.monotonic() + _START_S
                while not _accepts(path):
                    if time.monotonic() > limit_s:
                        raise TimeoutError(f"{command} did not start")
                    time.sleep(_POLL_S)
                yield path
            finally:
                process.terminate()


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0
