"""Baselines of the pool's figures: the latency of a Unix socket, and the throughput of loopback TCP."""

import multiprocessing
import socket
import ssl
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import cast

import numpy as np
import numpy.typing as npt
import xxhash

from kvloom.net.devcerts import make_files
from kvloom.net.tls import load_context
from kvloom.net.tlsconfig import TlsConfig, node_paths

Bytes = npt.NDArray[np.uint8]
_PING_BYTES = 64
_NEXT = b"n"  # the request for the bytes


def ping_pong_us(rounds: int) -> float:
    """Median microseconds for 64 bytes there and back over a Unix socket, between two threads."""
    here, there = socket.socketpair()

    def answer() -> None:
        while data := there.recv(_PING_BYTES):
            there.sendall(data)

    thread = threading.Thread(target=answer)
    thread.start()
    took = []
    with here, there:
        for _ in range(rounds):
            start_s = time.perf_counter()
            here.sendall(bytes(_PING_BYTES))
            here.recv(_PING_BYTES)
            took.append(time.perf_counter() - start_s)
        here.shutdown(socket.SHUT_RDWR)
        thread.join()
    return median(took) * 1e6


class TcpStream:
    """Bytes from another thread over one loopback TCP connection, received into memory of its own."""

    def __init__(self, total: int, chunk: int) -> None:
        """total: bytes a call of `receive`; chunk: bytes a send, a block's size."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._receiver = socket.create_connection(listener.getsockname())
            self._sender, _address = listener.accept()
        self._data = np.ones(chunk, np.uint8)
        self._num_chunks = total // chunk
        self._wanted = threading.Semaphore(0)
        self._is_closed = False
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def _send(self) -> None:
        while self._wanted.acquire() and not self._is_closed:
            for _ in range(self._num_chunks):
                self._sender.sendall(self._data.data)

    def receive(self, target: Bytes) -> None:
        self._wanted.release()
        view, position = target.data, 0
        while position < len(view):
            position += self._receiver.recv_into(view[position:])

    def close(self) -> None:
        self._is_closed = True
        self._wanted.release()
        self._thread.join()
        self._sender.close()
        self._receiver.close()


class TlsStream:
    """The same inside mutual TLS 1.3, from a process of its own: what Python's `ssl` can bring."""

    def __init__(self, total: int, chunk: int) -> None:
        """As TcpStream."""
        self._folder = tempfile.TemporaryDirectory(prefix="ems-bench-")
        make_files(Path(self._folder.name))
        files = node_paths(Path(self._folder.name))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            arguments = (files, listener.getsockname()[1], total // chunk, chunk)
            self._process = multiprocessing.get_context("spawn").Process(target=_send_inside_tls, args=arguments)
            self._process.start()
            sock, _address = listener.accept()
        self._receiver = load_context(files, ssl.PROTOCOL_TLS_CLIENT).wrap_socket(sock)

    def receive(self, target: Bytes) -> None:
        """Fills it, `total` bytes."""
        self._receiver.sendall(_NEXT)
        view, position = target.data, 0
        while position < len(view):
            count = cast(int, self._receiver.read(len(view) - position, view[position:]))
            if not count:
                raise ConnectionResetError("the sender is gone")
            position += count

    def close(self) -> None:
        self._receiver.close()
        self._process.join()
        self._folder.cleanup()


def _send_inside_tls(files: TlsConfig, port: int, num_chunks: int, chunk: int) -> None:
    """Of a process of its own, until the receiver is gone."""
    context = load_context(files, ssl.PROTOCOL_TLS_SERVER)
    with context.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_side=True) as sender:
        data = np.ones(chunk, np.uint8)
        while sender.recv(len(_NEXT)):
            for _ in range(num_chunks):
                sender.sendall(data.data)


def copy_blocks(source: Bytes, target: Bytes, block_bytes: int, is_verified: bool) -> None:
    """Copies block by block as a load does, with or without summing each one first."""
    for start in range(0, len(source), block_bytes):
        block = source[start : start + block_bytes]
        if is_verified:
            xxhash.xxh3_128_digest(block.data)
        target[start : start + block_bytes] = block
