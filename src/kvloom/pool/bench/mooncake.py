"""Mooncake Store beside the pool in a bench run, when it is installed: its own segment, so a copy within the process.

Its fastest interface: registered buffers, one batch a call. It needs `mooncake_master` and an address other than
loopback.
"""

import contextlib
import importlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.pool.bench.agents import free_port

Bytes = npt.NDArray[np.uint8]
_START_S = 10.0
_POLL_S = 0.05


def is_installed() -> bool:
    """Whether master and client are there and can be loaded."""
    if shutil.which("mooncake_master") is None:
        return False
    try:
        importlib.import_module("mooncake.store")
    except ImportError:
        return False
    return not _own_address().startswith("127.")


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; shows which address the kernel would use
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


class MooncakeClient:
    """Saves from and loads into one registered array.

    What is saved stays until `pool_bytes` have followed, so its memory is used in turn, as that of a full pool is.
    """

    def __init__(self, master: str, pool_bytes: int, data: Bytes) -> None:
        self._store: Any = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        host = f"{_own_address()}:{free_port()}"
        code = self._store.setup(host, "P2PHANDSHAKE", 2 * pool_bytes, 64 << 20, "tcp", "", master)
        if code:
            raise RuntimeError(f"Mooncake's setup failed with code {code}")
        self._store.register_buffer(data.ctypes.data, data.nbytes)
        self._pool_bytes = pool_bytes
        self._kept: deque[tuple[list[str], int]] = deque()
        self._kept_bytes = 0

    def save(self, names: list[str], data: Bytes, size: int) -> None:
        codes = self._store.batch_put_from(names, self._places(names, data, size), [size] * len(names))
        assert not any(codes), "a block was not stored"

    def load(self, names: list[str], target: Bytes, size: int) -> None:
        counts = self._store.batch_get_into(names, self._places(names, target, size), [size] * len(names))
        assert set(counts) == {size}, "a block is missing"

    def evict(self, names: list[str], size: int) -> None:
        """These were saved; removes the oldest ones beyond `pool_bytes`. The store's own eviction comes too late for a
        bench, and then it refuses blocks.
        """
        self._kept.append((names, len(names) * size))
        self._kept_bytes += len(names) * size
        while self._kept_bytes > self._pool_bytes:
            oldest, num_bytes = self._kept.popleft()
            self._store.batch_remove(oldest, True)
            self._kept_bytes -= num_bytes

    @staticmethod
    def _places(names: list[str], data: Bytes, size: int) -> list[int]:
        return [data.ctypes.data + i * size for i in range(len(names))]

    def close(self) -> None:
        self._store.close()


@contextlib.contextmanager
def private_master() -> Iterator[str]:
    """A master process; its host:port. Raises TimeoutError when it does not start."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ems-bench-") as folder:
        command = ["mooncake_master", f"-rpc_port={port}", f"-metrics_port={free_port()}"]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                limit_s = time.monotonic() + _START_S
                while not _accepts(port):
                    if time.monotonic() > limit_s:
                        raise TimeoutError("mooncake_master did not start")
                    time.sleep(_POLL_S)
                yield f"127.0.0.1:{port}"
            finally:
                process.terminate()


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
