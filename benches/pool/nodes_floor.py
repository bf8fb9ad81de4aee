"""The least that a load from another node needs: three bare processes, for `benches.pool.nodes`.

One sends blocks out of memory as large as a pool, one receives them into memory of that size and sums them, and the
caller sums each again and copies it, while the rest comes. No index, no keys, no frames; and one connection.
"""

import contextlib
import mmap
import os
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import psutil
import xxhash

from kvloom.net.devcerts import make_files
from kvloom.net.tls import load_context
from kvloom.net.tlsconfig import TlsConfig, node_paths

Bytes = npt.NDArray[np.uint8]
_AT_ONCE_BYTES = 256 << 10  # received, then checksummed while it is in the cache
_TOLD_BYTES = 1 << 20  # blocks received at a time
_NEXT = b"n"  # requests the next batch, and reports that a part of it has come


class Connection(Protocol):
    """A socket, or TLS over one."""

    def sendall(self, data: bytes | memoryview, /) -> None: ...

    def recv(self, size: int, /) -> bytes: ...


class BareNodes:
    """Three processes that move batches of `total` bytes through memories of `num_batches` batches, in turn."""

    def __init__(self, total: int, block_bytes: int, num_batches: int, is_encrypted: bool) -> None:
        """Forks, so it must run before threads start."""
        self._block_bytes, self._pool = block_bytes, _memory(total * num_batches)
        self._total, self._turn = total, 0
        self._own, theirs = socket.socketpair()
        with tempfile.TemporaryDirectory(prefix="ems-bench-") as folder, _listener() as listener:
            files = _files(Path(folder)) if is_encrypted else None
            address = listener.getsockname()
            self._children = [
                _forked(lambda: _send(_connection(socket.create_connection(address), files, True), total, num_batches)),
                _forked(lambda: self._receive(_connection(listener.accept()[0], files, False), theirs)),
            ]
            theirs.close()
            self._own.recv(1)  # the forked processes hold the descriptors

    def _receive(self, connection: Connection, caller: socket.socket) -> None:
        read, turn = _reading(connection), 0
        caller.sendall(_NEXT)
        while caller.recv(1):
            connection.sendall(_NEXT)
            batch = self._batch(turn)
            untold = 0
            for start in range(0, self._total, self._block_bytes):
                _fill(read, batch[start : start + self._block_bytes].data)
                untold += self._block_bytes
                if untold >= _TOLD_BYTES or start + self._block_bytes == self._total:
                    caller.sendall(_NEXT * (untold // self._block_bytes))
                    untold = 0
            turn += 1

    def _batch(self, turn: int) -> Bytes:
        start = turn * self._total % len(self._pool)
        return self._pool[start : start + self._total]

    def load(self, target: Bytes) -> None:
        """Load a batch into `target`, which has its size."""
        self._own.sendall(_NEXT)
        batch, position = self._batch(self._turn), 0
        while position < self._total:
            come = len(self._own.recv(_TOLD_BYTES)) * self._block_bytes
            assert come, "a process is gone"
            for start in range(position, position + come, self._block_bytes):
                block = batch[start : start + self._block_bytes]
                xxhash.xxh3_128_intdigest(block.data)
                target[start : start + self._block_bytes] = block
            position += come
        self._turn += 1

    def processor_s(self) -> list[float]:
        """Processor seconds of the receiver, the sender and this process."""
        times = [psutil.Process(child).cpu_times() for child in reversed(self._children)]
        return [*(each.user + each.system for each in times), time.process_time()]

    def close(self) -> None:
        self._own.shutdown(socket.SHUT_RDWR)  # forked processes share it
        self._own.close()
        for child in self._children:
            os.waitpid(child, 0)


def _memory(size: int) -> Bytes:
    """Memory that forked processes share, with all pages touched."""
    memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    memory[:: mmap.PAGESIZE] = 1
    return memory


@contextlib.contextmanager
def _listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def _files(folder: Path) -> TlsConfig:
    make_files(folder)
    return node_paths(folder)


def _forked(run: Callable[[], None]) -> int:
    """Fork a process that calls `run` and exits; its id."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            run()
        os._exit(0)
    return child


def _connection(sock: socket.socket, files: TlsConfig | None, is_server: bool) -> Connection:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if files is None:
        return sock
    context = load_context(files, ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    return cast(Connection, context.wrap_socket(sock, server_side=is_server))


def _reading(connection: Connection) -> Callable[[memoryview], int]:
    """The function that reads bytes into memory; TLS reads one record at a time."""
    if isinstance(connection, socket.socket) and hasattr(connection, "read"):
        return lambda view: cast(int, connection.read(len(view), view))
    return cast(socket.socket, connection).recv_into


def _fill(read: Callable[[memoryview], int], block: memoryview) -> None:
    """Receive a block and checksum it."""
    summing, position, summed = xxhash.xxh3_128(), 0, 0
    while position < len(block):
        count = read(block[position : position + _AT_ONCE_BYTES])
        if not count:
            raise ConnectionResetError("the sender is gone")
        position += count
        if position - summed >= _AT_ONCE_BYTES or position == len(block):
            summing.update(block[summed:position])
            summed = position
    summing.intdigest()


def _send(connection: Connection, total: int, num_batches: int) -> None:
    """Send batches until the receiver has closed."""
    pool, turn = _memory(total * num_batches), 0
    while connection.recv(1):
        start = turn * total % len(pool)
        connection.sendall(pool[start : start + total].data)
        turn += 1
