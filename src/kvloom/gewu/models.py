"""The models in memory: loaded when needed, shared by sessions, unloaded when idle or when memory is short.

  ABSENT  --start / prepare-->  LOADING  --> READY  --idle, evicted, dead-->  ABSENT

A model with sessions stays known while ABSENT; the next request loads it again.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvloom.engine.errors import ModelError
from kvloom.gewu.codes import Code, Refused
from kvloom.gewu.memory import (
    MIN_KV_TOKENS,
    Holder,
    Ladder,
    budget_bytes,
    kv_need,
    kv_tokens,
    plan_admission,
)
from kvloom.gewu.messages import Abort, Event, Floor, Host, Job, Open, Opener
from kvloom.gewu.probe import Found
from kvloom.gewu.qos import Level
from kvloom.gewu.sessions import Request, Session, Sessions
from kvloom.gewu.settings import Settings
from kvloom.gewu.system import read_memory

log = logging.getLogger(__name__)

LINGER_S = 10.0  # a model without sessions is kept so long
SHED_AFTER_S = 5.0  # of pressure level 2: running BACKGROUND requests are given up
_KV_TOKENS = 8_192  # KV cache of a model, all sessions together, when there is room


class State(Enum):
    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"


@dataclass(slots=True, eq=False)
class Model:
    found: Found
    fd: int  # keeps the files reachable, whatever their path
    max_ctx: int | None = None
    state: State = State.ABSENT
    host: Host | None = None
    task: asyncio.Task[None] | None = None  # while LOADING
    held_bytes: int = 0
    kv_tokens: int = 0  # that its KV cache holds, or will
    measured_bytes: int = 0  # weights in memory, once it was loaded
    num_loads: int = 0
    last_used_s: float = 0.0
    load_s: float = 0.0
    floor: Floor | None = None  # as the host knows it

    @property
    def key(self) -> str:
        return self.found.key

    @property
    def weight_bytes(self) -> int:
        return self.measured_bytes or self.found.weight_bytes

    @property
    def max_seq_len(self) -> int | None:
        """Tokens of a context, as asked for or as the model's files say; None = not known."""
        return min((n for n in (self.max_ctx, self.found.max_seq_len) if n is not None), default=None)


class Models:
    """Owned by the daemon's loop. `sessions` is read, never changed; what ends is reported through the callbacks."""

    def __init__(
        self,
        opener: Opener,
        settings: Settings,
        sessions: Sessions,
        on_events: Callable[[list[Event]], None],
        on_failed: Callable[[list[Request], Code, str], None],
    ) -> None:
        self._opener = opener
        self._settings = settings
        self._sessions = sessions
        self._on_events = on_events
        self._on_failed = on_failed
        self._models: dict[str, Model] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.ladder = Ladder()
        self.power_reason: str | None = None  # why BACKGROUND is paused
        self.num_evictions = 0
        self._shed_at_s: float | None = None
        self._hard_floor = Level.BACKGROUND

    # -- sessions come and go

    def admit(self, found: Found, fd: int, max_ctx: int | None, level: Level) -> Model:
        """The model for a new session, loading unless that should wait. Takes `fd`. Raises Refused (NOMEM)."""
        model = self._models.get(found.key)
        if model is not None:
            os.close(fd)
        else:
            model = Model(found, fd, max_ctx, last_used_s=time.monotonic())
        if model.state is State.ABSENT:
            try:
                self._plan(model, level)
            except Refused:
                if found.key not in self._models:
                    os.close(fd)
                raise
            self._models[found.key] = model
            if self.ladder.level == 0 and level > Level.UTILITY:
                self._load(model, level)
        return model

    def reserve(self, request: Request) -> None:
        """See that there is KV cache for a request that comes. Raises Refused (NOMEM)."""
        model = self._models[request.session.model]
        need = _kv_need(request, model)
        if model.state is State.ABSENT:
            self._plan(model, request.level, min(need, _KV_TOKENS))
        elif need > model.kv_tokens:
            raise Refused(Code.NOMEM, f"the KV cache holds {model.kv_tokens} tokens, {need} are needed")

    def start(self, request: Request) -> None:
        """A request's turn has come: give it to the host, or load the model for it."""
        model = self._models[request.session.model]
        model.last_used_s = time.monotonic()
        if model.state is State.READY and model.host is not None:
            self._send_floors()
            model.host.send(_job(request))
        elif model.state is State.ABSENT:
            self._load(model, request.level)

    def stop(self, request: Request) -> None:
        """A started request was aborted."""
        model = self._models[request.session.model]
        model.last_used_s = time.monotonic()
        if model.host is not None:
            model.host.send(Abort(request.key))
        self._send_floors()

    def ended(self, request: Request) -> None:
        """A request has ended by itself."""
        self._models[request.session.model].last_used_s = time.monotonic()
        self._send_floors()

    def released(self, key: str) -> None:
        """A session of this model was destroyed."""
        self._models[key].last_used_s = time.monotonic()

    # -- loading and unloading

    def _holders(self, but: Model) -> list[Holder]:
        return [
            Holder(m.key, m.held_bytes, self._level_of(m), m.last_used_s)
            for m in self._models.values()
            if m is not but and m.state is not State.ABSENT
        ]

    def _level_of(self, model: Model) -> Level | None:
        return max((request.level for request in self._sessions.unfinished(model.key)), default=None)

    def _budget(self) -> int:
        """Bytes for models now. Memory of hosts that are still closing counts as used."""
        held = sum(model.held_bytes for model in self._models.values())
        return budget_bytes(read_memory(self._settings.psi_file), self._settings.budget_bytes, held)

    def _plan(self, model: Model, level: Level, num_kv_tokens: int = MIN_KV_TOKENS) -> list[str]:
        """Which models to evict for this one. Raises Refused (NOMEM)."""
        if self.ladder.level >= 2 and level == Level.BACKGROUND:
            raise Refused(Code.NOMEM, "memory is short: background work must wait")
        need = model.weight_bytes + max(MIN_KV_TOKENS, num_kv_tokens) * model.found.kv_bytes_per_token
        victims = plan_admission(need, self._budget(), self._holders(model), level)
        if victims is None:
            raise Refused(Code.NOMEM, f"{model.found.path} needs {need >> 20} MiB, which cannot be freed")
        return victims

    def _load(self, model: Model, level: Level) -> None:
        """ABSENT -> LOADING, after evicting what must go; or its requests fail."""
        waiting = [_kv_need(request, model) for request in self._sessions.unfinished(model.key)]
        try:
            victims = self._plan(model, level, min(max(waiting, default=0), _KV_TOKENS))
        except Refused as error:
            self._fail(model, error.code, str(error))
            return
        model.state = State.LOADING
        model.num_loads += 1
        evictions = [self._evict(self._models[key]) for key in victims]
        weights, per_token = model.weight_bytes, model.found.kv_bytes_per_token
        free = self._budget() - sum(holder.bytes for holder in self._holders(model)) - weights
        model.kv_tokens = max(MIN_KV_TOKENS, kv_tokens(per_token, free, _KV_TOKENS))
        model.held_bytes = weights + model.kv_tokens * per_token
        model.task = asyncio.get_running_loop().create_task(self._open(model, evictions))

    async def _open(self, model: Model, evictions: list[asyncio.Task[None]]) -> None:
        for eviction in evictions:
            await eviction
        began_s = time.monotonic()
        kv_bytes = model.kv_tokens * model.found.kv_bytes_per_token
        path = f"/proc/self/fd/{model.fd}"
        setup = Open(path, self._settings.backend, model.max_ctx, kv_bytes, model.kv_tokens)
        try:
            host = await self._opener(setup, model.fd, self._on_events, lambda why: self._died(model, why))
        except ModelError as error:
            log.warning("%s: %s", model.found.path, error)
            model.task = None
            self._forget_host(model)
            self._fail(model, Code.FAULT, str(error))
            return
        model.state, model.host, model.task = State.READY, host, None
        model.load_s = time.monotonic() - began_s
        model.last_used_s = time.monotonic()
        model.kv_tokens = host.info.kv_tokens
        if host.info.weight_bytes:
            model.measured_bytes = host.info.weight_bytes
            model.held_bytes = host.info.weight_bytes + host.info.kv_bytes
        self._send_floors()
        for request in [r for r in self._sessions.started() if r.session.model == model.key]:
            host.send(_job(request))

    def _forget_host(self, model: Model) -> None:
        model.state, model.host, model.held_bytes, model.floor = State.ABSENT, None, 0, None
        model.kv_tokens = 0

    def _died(self, model: Model, why: str) -> None:
        if model.host is not None:
            log.error("%s: %s", model.found.path, why)
            self._forget_host(model)
            self._fail(model, Code.FAULT, why)

    def _fail(self, model: Model, code: Code, why: str) -> None:
        self._on_failed(self._sessions.unfinished(model.key), code, why)

    def _evict(self, model: Model) -> asyncio.Task[None]:
        self.num_evictions += 1
        task = self._unload(model)
        self._fail(model, Code.NOMEM, "memory is short")
        return task

    def _unload(self, model: Model) -> asyncio.Task[None]:
        """READY or LOADING -> ABSENT. The task ends when the memory has been returned."""
        host, loading = model.host, model.task
        model.task = None
        self._forget_host(model)
        task = asyncio.get_running_loop().create_task(_close(host, loading))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    # -- time passes

    def tick(self, fired: int = 0) -> None:
        """Unload what is idle, follow the pressure ladder. Called a few times a second, and when a trigger fires."""
        now_s = time.monotonic()
        for model in list(self._models.values()):
            if self._sessions.unfinished(model.key):
                continue
            sessions = self._sessions.of_model(model.key)
            if now_s - model.last_used_s >= self._keep_s([session.keep_alive_s for session in sessions]):
                if model.state is not State.ABSENT:
                    self._unload(model)
                if not sessions:
                    os.close(model.fd)
                    del self._models[model.key]
        level = self.ladder.update(read_memory(self._settings.psi_file), now_s, fired)
        if level >= 1:
            for model in list(self._models.values()):
                if model.state is State.READY and not self._sessions.unfinished(model.key):
                    self._evict(model)
        self._follow(level, now_s)

    def _keep_s(self, wishes: list[float | None]) -> float:
        """How long an idle model with these sessions' wishes stays; without any it lingers."""
        idle_s = self._settings.idle_unload_s
        return max(idle_s if wish is None else wish for wish in wishes) if wishes else min(LINGER_S, idle_s)

    def _follow(self, level: int, now_s: float) -> None:
        """Level 2 pauses BACKGROUND and UTILITY, and gives BACKGROUND up when that did not help."""
        if level < 2:
            self._shed_at_s = None
        elif self._shed_at_s is None:
            self._shed_at_s = now_s + SHED_AFTER_S
        elif now_s >= self._shed_at_s:
            low = [request for request in self._sessions.unfinished() if request.level == Level.BACKGROUND]
            for request in low:
                self._abandon(request)
            self._on_failed(low, Code.NOMEM, "memory is short")
        paused_below = Level.UTILITY if self.power_reason else Level.BACKGROUND
        self._hard_floor = Level.DEFAULT if level >= 2 else paused_below
        self._send_floors()

    def _abandon(self, request: Request) -> None:
        model = self._models[request.session.model]
        if model.host is not None:
            model.host.send(Abort(request.key))

    def _send_floors(self) -> None:
        """Tell each host which class is served on this device now."""
        ready = {model.key: model for model in self._models.values() if model.host is not None}
        served = (r.level for r in self._sessions.started() if r.session.model in ready)
        floor = Floor(int(max(served, default=Level.BACKGROUND)), int(self._hard_floor), self.ladder.level >= 2)
        for model in ready.values():
            if model.host is not None and model.floor != floor:
                model.floor = floor
                model.host.send(floor)

    # -- for people

    def status(self) -> dict[str, Any]:
        return {
            "models": [self._describe(model) for model in self._models.values()],
            "memory": {
                "budget_bytes": self._budget(),
                "held_bytes": sum(model.held_bytes for model in self._models.values()),
                "pressure": self.ladder.level,
                "evictions": self.num_evictions,
            },
            "paused": {"below": self._hard_floor.name.lower(), "reason": self.power_reason}
            if self._hard_floor
            else None,
        }

    def kv_bytes(self, session: Session) -> int:
        """KV cache that the session's running request holds; what its earlier ones left may be overwritten."""
        host = self._models[session.model].host
        if host is None or not host.info.kv_tokens:
            return 0
        return host.held_tokens.get(session.salt, 0) * host.info.kv_bytes // host.info.kv_tokens

    def _describe(self, model: Model) -> dict[str, Any]:
        return {
            "path": model.found.path,
            "state": model.state.value,
            "bytes": model.held_bytes,
            "loads": model.num_loads,
            "load_s": round(model.load_s, 3),
            "sessions": len(self._sessions.of_model(model.key)),
            "pid": model.host.pid if model.host else None,
            "backend": model.host.info.backend if model.host else None,
        }

    async def close(self) -> None:
        """Unload everything."""
        for model in list(self._models.values()):
            self._unload(model)
            os.close(model.fd)
        self._models.clear()
        while self._closing:
            await asyncio.gather(*self._closing)


async def _close(host: Host | None, loading: asyncio.Task[None] | None) -> None:
    if loading is not None:
        loading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loading
    if host is not None:
        await host.close()


def _kv_need(request: Request, model: Model) -> int:
    return kv_need(request.num_prompt_bytes, request.chat.max_tokens, model.max_seq_len)


def _job(request: Request) -> Job:
    chat = request.chat
    return Job(
        request.key,
        chat.messages,
        int(request.level),
        request.session.salt,
        chat.max_tokens,
        chat.temperature,
        chat.top_p,
        chat.seed,
        chat.stop,
    )
