"""Blocks whose expected bytes follow from their hash; agents and writers as processes that can be killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
import torch

from ems import CcKvOption
from ems.context_caching import ContextCaching
from tests.support.pool.agents import BLOCK_SIZE, slots_of

NUM_BLOCKS = 32
BLOCK_BYTES = 16384


class Oracle:
    """A KV cache of one tensor, and the expected bytes of every hash."""

    def __init__(self) -> None:
        self.tensor = torch.zeros((NUM_BLOCKS, BLOCK_SIZE, 1, BLOCK_BYTES // BLOCK_SIZE), dtype=torch.uint8)
        self.kv = [[self.tensor]]
        self._rows = self.tensor.view(NUM_BLOCKS, BLOCK_BYTES).numpy()

    def truth(self, block_hash: int) -> np.ndarray:
        return np.random.default_rng(block_hash).integers(0, 256, BLOCK_BYTES, np.uint8)

    def save(self, cc: ContextCaching, hashes: list[int], **option: object) -> int:
        for row, block_hash in enumerate(hashes):
            self._rows[row] = self.truth(block_hash)
        blocks = range(len(hashes))
        return cc.save(slots_of(*blocks), hashes, [BLOCK_SIZE] * len(hashes), CcKvOption(**option)).success

    def load(self, cc: ContextCaching, hashes: list[int], **option: object) -> int:
        """Loads and compares every byte: blocks that were loaded must be correct, all others unchanged."""
        self._rows[:] = 0xEE
        blocks = range(len(hashes))
        count = cc.load(slots_of(*blocks), hashes, [BLOCK_SIZE] * len(hashes), CcKvOption(**option)).success
        for row, block_hash in enumerate(hashes[:count]):
            assert (self._rows[row] == self.truth(block_hash)).all(), f"wrong bytes for {block_hash}"
        assert (self._rows[count:] == 0xEE).all(), "a block beyond the prefix was written"
        return count


class AgentProcess:
    """`kvloom pool agent` on a socket; can be started again after a kill."""

    def __init__(self, socket: Path, *arguments: str, stderr: IO[bytes] | None = None) -> None:
        self.socket = socket
        self._stderr = stderr
        self._arguments = [
            f"--socket={socket}",
            "--pool=8M",
            "--segment=1M",
            "--slab=256K",
            "--no-prefault",
            *arguments,
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns once the agent serves."""
        command = [sys.executable, "-m", "kvloom", "pool", "agent", *self._arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._stderr)
        assert b"serving" in self.process.stdout.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """The process is stopped (SIGSTOP) within the context."""
        self.process.send_signal(signal.SIGSTOP)
        while any(" T " not in stat.read_text() for stat in Path(f"/proc/{self.process.pid}/task").glob("*/stat")):
            time.sleep(0.001)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> "AgentProcess":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def run_until_killed(task: Callable[[Callable[[], object]], None], count: int) -> None:
    """Runs `task` in a forked child repeatedly; kills the child when it has called its argument this many times."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            while True:
                task(lambda: os.write(writer, b"."))
        os._exit(1)
    os.close(writer)
    for _ in range(count):
        os.read(reader, 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reader)
