"""Clusters of agent processes for random walks: one node or three, with various options of an agent."""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.support.pool.faults import AgentProcess
from tests.support.pool.node_tls import NodeFiles
from tests.support.ports import free_port

SLAB_BYTES = 256 << 10
_ROOMY = ("--pool=128M", "--segment=4M", "--slab=256K", "--staging=16M", "--rcache=0.5")
_SECRET = "a secret of a walk, of more than thirty-two bytes"
_STILL_S = 0.5


@dataclass(frozen=True)
class Kind:
    """num_nodes; arguments of every agent; environment of every agent; whether it keeps its blocks over a restart."""

    num_nodes: int = 1
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    has_tls: bool = False
    has_snapshot: bool = False


KINDS = {
    "one": Kind(),
    "one, direct": Kind(arguments=("--direct",)),
    "one, without C++": Kind(environment=(("EMS_NATIVE", "0"),)),
    "one, lru, snapshot": Kind(arguments=("--eviction=lru",), has_snapshot=True),
    "three": Kind(3),
    "three, TLS": Kind(3, has_tls=True),
    "three, without C++, snapshot": Kind(3, environment=(("EMS_NATIVE", "0"),), has_snapshot=True),
}


class World:
    """The agents of a kind, until the context ends."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind, self._folder = KINDS[kind], folder
        self.nodes: list[AgentProcess] = []
        self.can_kill = True
        self._stack = ExitStack()

    def __enter__(self) -> "World":
        kind, folder = self._kind, self._folder
        (folder / "secret").write_text(_SECRET)
        ports = [free_port() for _ in range(kind.num_nodes)]
        files = NodeFiles(folder / "tls") if kind.has_tls else None
        for i, port in enumerate(ports):
            arguments = [*_ROOMY, *kind.arguments]
            if kind.has_snapshot:
                arguments.append(f"--snapshot-dir={folder / f'kept-{i}'}")
            if kind.num_nodes > 1:
                arguments += [f"--secret-file={folder / 'secret'}", f"--node-id=n{i}", f"--listen=127.0.0.1:{port}"]
                arguments += [f"--peer=n{j}=127.0.0.1:{other}" for j, other in enumerate(ports) if j != i]
            if files is not None:
                tls = files.config(f"n{i}")
                arguments += [f"--tls-ca={tls.ca_files[0]}", f"--tls-cert={tls.cert}", f"--tls-key={tls.key}"]
            log = self._stack.enter_context((folder / f"{i}.log").open("ab"))
            self.nodes.append(AgentProcess(folder / f"{i}.sock", *arguments, stderr=log))
        for i in range(len(self.nodes)):
            self.start(i)
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.kill()
        self._stack.close()

    def locator(self, node: int) -> Callable[[float], Path]:
        return lambda _deadline_s: self.nodes[node].socket

    def start(self, node: int) -> None:
        before = dict(os.environ)
        os.environ.update(self._kind.environment)
        try:
            self.nodes[node].start()
        finally:
            os.environ.clear()
            os.environ.update(before)

    def kill(self, node: int) -> None:
        self.nodes[node].kill()

    def disturb(self, dice: random.Random) -> tuple[str, bool]:
        """Disturbs a node. Returns what happened, and whether every block must still be there."""
        node = dice.randrange(len(self.nodes))
        what = dice.choice(["killed", "stood still", "restarted"])
        if what == "stood still":
            with self.nodes[node].stopped():
                time.sleep(_STILL_S)
            return what, True
        if what == "killed":
            self.kill(node)
        else:
            process = self.nodes[node].process
            assert process is not None
            process.send_signal(signal.SIGTERM)
            process.wait(20)
            assert process.stdout is not None
            process.stdout.close()
        self.start(node)
        keeps = what == "restarted" and self._kind.has_snapshot
        if keeps:
            self._wait_for_snapshot(node)
        return what, keeps

    def _wait_for_snapshot(self, node: int) -> None:
        end_s = time.monotonic() + 30
        while list((self._folder / f"kept-{node}").glob("*.ems")):
            assert time.monotonic() < end_s, "the snapshot was not read"
            time.sleep(0.01)
