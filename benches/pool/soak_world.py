"""The processes of the pool's soak: a control plane and nodes that join, leave and die; tenants whose limits change."""

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from tests.support.pool.faults import AgentProcess
from tests.support.ports import free_port
from tests.support.waiting import until

_POOL = ("--pool=48M", "--segment=4M", "--slab=1M", "--staging=16M", "--listen=127.0.0.1:0")
_MB = 1 << 20
_STILL_S = 3.0  # the time that a node stays stopped, longer than the deadlines of calls
_DRAIN_S = 3.0
_JOIN_S = 30.0
TENANTS = ("red", "green", "blue")


class Node:
    """A node's process and its socket. `is_here`: it was started and not ended by the soak."""

    def __init__(self, folder: Path, number: int, arguments: tuple[str, ...]) -> None:
        self.name = f"node-{number}"
        self.socket = folder / f"{self.name}.sock"
        self._log = (folder / f"{self.name}.log").open("ab")
        self._agent = AgentProcess(self.socket, *_POOL, f"--node-id={self.name}", *arguments, stderr=self._log)
        self.is_here = False

    def start(self) -> None:
        self._agent.start()
        self.is_here = True

    def kill(self) -> None:
        self.is_here = False
        self._agent.kill()

    def stop(self) -> None:
        """End the node in an orderly way."""
        self.is_here = False
        process = self._agent.process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        process.wait(20)

    def stand_still(self) -> None:
        with self._agent.stopped():
            time.sleep(_STILL_S)


class World:
    """A control plane, nodes and tenants, until the context ends. `epoch` grows with each disturbance and its end."""

    def __init__(self, folder: Path, num_nodes: int, seed: int) -> None:
        secret, token = folder / "secret", folder / "token"
        secret.write_text("a secret of the soak, of more than thirty-two bytes")
        token.write_text("a token of the soak")
        self.epoch = 0
        self.keys: dict[str, str] = {}
        self._port = free_port()
        self._dice = random.Random(seed)
        url = f"http://127.0.0.1:{self._port}"
        self._client = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {token.read_text()}"}, timeout=10.0, trust_env=False
        )
        self._command = [sys.executable, "-m", "kvloom", "pool", "control", f"--listen=127.0.0.1:{self._port}"]
        self._command += [f"--secret-file={secret}", f"--admin-token-file={token}", f"--state={folder / 'control.db'}"]
        arguments = (f"--secret-file={secret}", f"--control={url}")
        self.nodes = [Node(folder, i, (*arguments, f"--state={folder / f'{i}.state'}")) for i in range(num_nodes)]
        self._control: subprocess.Popen[bytes] | None = None
        self._log = (folder / "control.log").open("ab")
        self._lock = threading.Lock()

    def __enter__(self) -> "World":
        self._start_control()
        for tenant in TENANTS:
            answer = self._ask("POST", "/v1/credentials", {"access_id": tenant, "tenant": tenant})
            self.keys[tenant] = answer["access_key"]
            self._limit(tenant, 4 * _MB, 40 * _MB)
        for node in self.nodes:
            node.start()
        self._wait_joined()
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            if node.is_here:
                node.kill()
        if self._control is not None:
            self._control.kill()
            self._control.wait()
        self._client.close()

    def here(self) -> list[Node]:
        """The running nodes that the soak has not ended."""
        return [node for node in self.nodes if node.is_here]

    def disturbances(self) -> list[tuple[str, Callable[[], None]]]:
        """One round of disturbances, with their names. Each returns when the cluster works again."""
        return [
            ("node killed", self._kill_node),
            ("node left and joined", self._leave_and_join),
            ("node stood still", lambda: self._dice.choice(self.here()).stand_still()),
            ("control plane killed", self._kill_control),
            ("limits changed", self._change_limits),
            ("eviction ordered", self._evict),
        ]

    def disturb(self, befall: Callable[[], None]) -> None:
        self.epoch += 1
        try:
            befall()
        finally:
            self.epoch += 1

    def _kill_node(self) -> None:
        node = self._dice.choice(self.here())
        node.kill()
        time.sleep(self._dice.uniform(0, 4))
        node.start()
        self._wait_joined()

    def _leave_and_join(self) -> None:
        node = self._dice.choice(self.here())
        self._ask("POST", f"/v1/nodes/{node.name}:drain")
        time.sleep(_DRAIN_S)
        node.stop()
        self._ask("DELETE", f"/v1/nodes/{node.name}")
        time.sleep(self._dice.uniform(0, 8))
        node.start()
        self._wait_joined()
        self._ask("POST", f"/v1/nodes/{node.name}:undrain")

    def _kill_control(self) -> None:
        assert self._control is not None
        self._control.kill()
        self._control.wait()
        time.sleep(self._dice.uniform(0, 6))
        self._start_control()

    def _change_limits(self) -> None:
        for tenant in TENANTS:
            guarantee = self._dice.randrange(0, 12) * _MB
            self._limit(tenant, guarantee, self._dice.randrange(16, 48) * _MB)

    def _evict(self) -> None:
        node, tenant = self._dice.choice(self.here()), self._dice.choice(TENANTS)
        path = f"/v1/nodes/{node.name}/blocks:evict"
        self._ask("POST", path, {"tenant": tenant, "bytes": self._dice.randrange(1, 16) * _MB})

    def _limit(self, tenant: str, guarantee: int, quota: int) -> None:
        self._ask("PUT", f"/v1/tenants/{tenant}", {"guarantee_bytes": guarantee, "quota_bytes": quota})

    def _start_control(self) -> None:
        self._control = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        until(self._answers, _JOIN_S)

    def _answers(self) -> bool:
        try:
            return self._client.get("/healthz").status_code == 200
        except httpx.HTTPError:
            return False

    def _wait_joined(self) -> None:
        """Wait until the control plane knows all running nodes, which know each other a heartbeat later."""
        names = {node.name for node in self.here()}
        until(lambda: names <= {node["node_id"] for node in self._alive()}, _JOIN_S)
        time.sleep(2.5)

    def _alive(self) -> list[dict[str, Any]]:
        return [node for node in self._ask("GET", "/v1/nodes")["nodes"] if node["is_alive"]]

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        with self._lock:
            answer = self._client.request(method, path, json=body)
        answer.raise_for_status()
        return answer.json() if answer.content else None
