"""The processes of the soak, a server and its pool, and their disturbances: kills and restarts."""

import json
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tests.support.pool.faults import AgentProcess
from tests.support.processes import CLI, ServeProcess, serving
from tests.support.waiting import until

from benches.server.soak_cases import ADAPTER, MODEL

_AGENT = ("--pool=512M", "--segment=32M", "--slab=8M")  # a block of 128 tokens of the demo model is 3 MB
_START_LIMIT_S = 120.0
_STOP_LIMIT_S = 60.0
_LOADED = "kv_tier_loaded_blocks"
WRONG = "WrongBytes"  # as the rank's traceback names it


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the server. `kv_mb` is so small that prefixes are constantly evicted and reloaded from the pool."""

    model: Path
    adapter: Path
    block_size: int = 128
    kv_dtype: str = "auto"
    kv_mb: int = 100

    def document(self, socket: Path | None) -> dict[str, Any]:
        """The config.json; with `socket`, of a server that uses this agent's pool and checks every byte of it."""
        pool = {"backend": "ems", "socketPath": str(socket), "timeoutMs": 5000, "verifyBlocks": True}
        model = {
            "modelName": MODEL,
            "modelWeightPath": str(self.model),
            "npuMemSize": self.kv_mb / 1000,
            "kvCacheDtype": self.kv_dtype,
            "loraModules": [f"{ADAPTER}={self.adapter}"],
        }
        return {
            "ServerConfig": {},
            "BackendConfig": {
                "kvPoolConfig": pool if socket else {},
                "ModelDeployConfig": {"maxSeqLen": 2048, "ModelConfig": [model]},
                "ScheduleConfig": {"cacheBlockSize": self.block_size, "maxPreemptCount": 8, "maxBatchSize": 16},
            },
        }


class World:
    """A server, and with `has_pool` an agent, until the context ends. After a restart only `url` changes."""

    def __init__(self, settings: Settings, folder: Path, has_pool: bool) -> None:
        self._folder = folder
        self._agent = AgentProcess(folder / "ems.sock", *_AGENT) if has_pool else None
        path = folder / "config.json"
        path.write_text(json.dumps(settings.document(folder / "ems.sock" if has_pool else None)))
        path.chmod(0o640)
        self._command = [*CLI, "serve", "--config", str(path), "--port", "0", "--grace", "2"]
        self._server: ServeProcess | None = None
        self._stack = ExitStack()
        self._client = httpx.Client(timeout=5.0, trust_env=False)
        self._num_loaded, self._last_loaded = 0, 0
        self._num_wrong = 0

    def __enter__(self) -> "World":
        if self._agent is not None:
            self._agent.start()
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._stop(signal.SIGTERM)
        if self._agent is not None:
            self._agent.kill()

    @property
    def url(self) -> str:
        """The URL of the running server, or of the last one."""
        assert self._server is not None
        return self._server.url

    @property
    def num_wrong(self) -> int:
        """The number of ranks, in stopped servers, that ended because of a wrong byte."""
        return self._num_wrong

    @property
    def num_loaded(self) -> int:
        """The number of blocks loaded from the pool, over all ranks so far."""
        return self._num_loaded + self._last_loaded

    def look(self) -> None:
        """Record the rank's number of loaded blocks; a restarted rank begins at 0."""
        try:
            text = self._client.get(self.url + "/metrics").text
        except httpx.HTTPError:
            return
        values = [float(line.split()[-1]) for line in text.splitlines() if _LOADED in line and line[0] != "#"]
        now = int(sum(values))
        if now < self._last_loaded:
            self._num_loaded += self._last_loaded
        self._last_loaded = now

    def disturbances(self) -> list[tuple[str, Callable[[], None]]]:
        """One round of disturbances, with their names. Each returns when the processes work again."""
        return [
            ("pool killed", self._kill_agent),
            ("rank killed", self._kill_rank),
            ("rank killed", self._kill_rank),
            ("server stopped", lambda: self._restart(signal.SIGTERM)),
            ("server killed", lambda: self._restart(signal.SIGKILL)),
        ]

    def _kill_agent(self) -> None:
        assert self._agent is not None
        self._agent.kill()
        self._agent.start()

    def _kill_rank(self) -> None:
        assert self._server is not None
        self.look()
        os.kill(self._server.rank_pid(), signal.SIGKILL)
        until(self._is_ready, _START_LIMIT_S)

    def _restart(self, number: signal.Signals) -> None:
        self.look()
        self._stop(number)
        self._start()

    def _is_ready(self) -> bool:
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
        try:
            return self._client.post(self.url + "/v1/completions", json=body, timeout=_START_LIMIT_S).status_code == 200
        except httpx.HTTPError:
            return False

    def _start(self) -> None:
        self._stack = ExitStack()
        self._server = self._stack.enter_context(serving(self._command, _START_LIMIT_S))

    def _stop(self, number: signal.Signals) -> None:
        assert self._server is not None
        self._server.process.send_signal(number)
        self._server.process.wait(_STOP_LIMIT_S)
        self._stack.close()
        self._num_wrong += sum(WRONG in line for line in self._server.lines)
