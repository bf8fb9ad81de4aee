"""The models in memory: loaded when needed, shared by sessions, unloaded when idle or when memory is short.

  ABSENT  --start / prepare-->  LOADING  --> READY  --idle, evicted, dead-->  ABSENT

A model with sessions stays known while ABSENT; the next request loads it again.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvloom.contract.errors import ModelError
from kvloom.gewu.codes import Code, Refused
from kvloom.gewu.modelfiles import ModelFiles
from kvloom.gewu.prober.probe import Found
from kvloom.gewu.protocol.messages import Abort, Event, Floor, Listeners, Open, Opener
from kvloom.gewu.qos import Level
from kvloom.gewu.service.ledger import Ledger
from kvloom.gewu.service.memory import (
    MIN_KV_TOKENS,
    Holder,
    Ladder,
    kv_tokens,
    plan_admission,
)
from kvloom.gewu.service.model import Model, State, close_host, job_of, open_host
from kvloom.gewu.service.sessions import Request, Session, Sessions, batch_group
from kvloom.gewu.service.settings import Settings
from kvloom.gewu.service.system import measure_processes, read_memory

log = logging.getLogger(__name__)

LINGER_S = 10.0  # seconds that a model without sessions is kept
SHED_AFTER_S = 5.0  # seconds of pressure level 2 after which running BACKGROUND requests end
_GUILTY = "the model's process died twice while it computed this request, the second time of this request alone"


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Callbacks for what becomes of requests."""

    events: Callable[[list[Event]], None]  # answers, partial or whole
    failed: Callable[[list[Request], Code, str], None]  # requests that end together, and the reason


class Models:
    """Owned by the daemon's loop. `sessions` is only read; ended requests are reported to `on`."""

    def __init__(self, opener: Opener, settings: Settings, sessions: Sessions, ledger: Ledger, on: Outcomes) -> None:
        self._opener = opener
        self._settings = settings
        self._sessions = sessions
        self._on = on
        self._models: dict[str, Model] = {}
        self._ledger = ledger
        self._closing: set[asyncio.Task[None]] = set()
        self.ladder = Ladder()
        self.power_reason: str | None = None  # why BACKGROUND is paused
        self.num_evictions = 0
        self._shed_at_s: float | None = None
        self._hard_floor = Level.BACKGROUND

    # -- sessions come and go

    def admit(self, found: Found, files: ModelFiles, max_ctx: int | None, level: Level) -> Model:
        """The model for a new session; loads it unless that should wait. Owns `files` then. Raises Refused (NOMEM)."""
        model = self._models.get(found.key)
        if model is None:
            model = Model(found, files, last_used_s=time.monotonic())
        else:
            files.close()
        if model.state is State.ABSENT:
            try:
                self._plan(model, level)
            except Refused:
                if found.key not in self._models:
                    files.close()
                raise
        self._models[found.key] = model
        if max_ctx is not None:
            model.wanted_tokens = max(model.wanted_tokens, model.context(max_ctx) or 0)
        if model.state is State.ABSENT and self.ladder.level == 0 and level > Level.UTILITY:
            self._load(model, level)
        return model

    def reserve(self, request: Request) -> None:
        """Make sure that a coming request finds KV cache. Raises Refused (NOMEM)."""
        model = self._models[request.session.model]
        need = model.kv_need(request)
        if need > model.wanted_tokens and need > model.kv_tokens:
            raise _no_room(max(model.kv_tokens, model.wanted_tokens), need)
        if model.state is State.ABSENT or need > model.kv_tokens:
            self._plan(model, request.level, need)

    def start(self, request: Request) -> None:
        """Give a request to the host, or load the model for it."""
        model = self._models[request.session.model]
        model.last_used_s = time.monotonic()
        if model.state is State.READY:
            self._send_all(model)
        elif model.state is State.ABSENT:
            self._load(model, request.level)

    def stop(self, request: Request) -> None:
        """A started request was aborted."""
        model = self._models[request.session.model]
        if model.host is not None:
            model.host.send(Abort(request.key))
        self.ended(request)

    def ended(self, request: Request) -> None:
        """A request has ended by itself."""
        model = self._models[request.session.model]
        model.last_used_s = time.monotonic()
        model.sent.discard(request.key)
        self._send_floors()
        self._grow(model)
        self._send_all(model)

    def progressed(self, request: Request) -> None:
        """A request whose process had died has progressed: it may be cleared, and others need not wait for it."""
        self._send_all(self._models[request.session.model])

    def _started(self, model: Model) -> list[Request]:
        return [request for request in self._sessions.started() if request.session.model == model.key]

    def _send_all(self, model: Model) -> None:
        """Send the host all requests that it should have now; abort those that it should not, which continue later."""
        started = self._started(model)
        wanted = batch_group(started, model.sent, self._hard_floor)
        for request in [request for request in started if request.key in model.sent and request not in wanted]:
            self._abandon(request)
        for request in wanted:
            if model.state is State.READY and request.key not in model.sent:  # sending the first may change both
                self._send(model, request)

    def _send(self, model: Model, request: Request) -> None:
        """Send a request to a READY model. One that needs a larger KV cache waits for it, as do those behind it."""
        if model.kv_need(request) > model.kv_tokens:
            model.is_growing = True
        if model.is_growing:
            self._grow(model)
        elif model.host is not None:
            model.sent.add(request.key)
            self._send_floors()
            model.host.send(job_of(request))

    def _grow(self, model: Model) -> None:
        """Reload a model that needs a larger KV cache, once it has no requests."""
        if not model.is_growing or model.sent:
            return
        waiting = self._started(model)
        large = [request for request in waiting if model.kv_need(request) > model.kv_tokens]
        model.is_growing = False
        try:
            if large:
                level = max(request.level for request in waiting)
                self._plan(model, level, max(model.kv_need(request) for request in large))
                self._load(model, level, [self._unload(model)])
                return
        except Refused as refused:
            self._on.failed(large, refused.code, str(refused))
        self._send_all(model)

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
        """Bytes for models now; hosts that are still closing count as used."""
        held = sum(model.held_bytes for model in self._models.values())
        return self._ledger.budget(read_memory(self._settings.psi_file), self._settings.budget_bytes, held)

    def _plan(self, model: Model, level: Level, num_kv_tokens: int = MIN_KV_TOKENS) -> list[str]:
        """The models to evict for this one. Raises Refused (NOMEM)."""
        if self.ladder.level >= 2 and level == Level.BACKGROUND:
            raise Refused(Code.NOMEM, "memory is short: background work must wait")
        need = self._ledger.fixed_bytes(model) + max(MIN_KV_TOKENS, num_kv_tokens) * model.found.kv_bytes_per_token
        victims = plan_admission(need, self._budget(), self._holders(model), level)
        if victims is None:
            raise Refused(Code.NOMEM, f"{model.found.path} needs {need >> 20} MiB, which cannot be freed")
        return victims

    def _load(self, model: Model, level: Level, closing: Sequence[asyncio.Task[None]] = ()) -> None:
        """ABSENT -> LOADING, after evictions; if there is no room its requests fail."""
        waiting = [model.kv_need(request) for request in self._sessions.unfinished(model.key)]
        try:
            victims = self._plan(model, level, min(max(waiting, default=0), model.wanted_tokens))
        except Refused as error:
            self._fail(model, error.code, str(error))
            return
        model.state = State.LOADING
        model.num_loads += 1
        evictions = [*closing, *(self._evict(self._models[key]) for key in victims)]
        fixed, per_token = self._ledger.fixed_bytes(model), model.found.kv_bytes_per_token
        free = self._budget() - sum(holder.bytes for holder in self._holders(model)) - fixed
        model.kv_tokens = max(MIN_KV_TOKENS, kv_tokens(per_token, free, model.wanted_tokens))
        model.held_bytes = fixed + model.kv_tokens * per_token
        model.task = asyncio.get_running_loop().create_task(self._open(model, evictions))

    async def _open(self, model: Model, evictions: list[asyncio.Task[None]]) -> None:
        if evictions:
            await asyncio.wait(evictions)  # not `await eviction`: a load that is given up would give those up too
        began_s = time.monotonic()
        kv_bytes = model.kv_tokens * model.found.kv_bytes_per_token
        setup = Open("", self._settings.backend, kv_bytes, model.kv_tokens)
        try:
            on = Listeners(self._on.events, lambda why: self._died(model, why))
            host = await open_host(model, self._opener, setup, on, self._settings.crash_patience_s)
        except ModelError as error:
            log.warning("%s: %s", model.found.path, error)
            model.task = None
            model.forget_host()
            self._fail(model, Code.FAULT, str(error))
            return
        model.state, model.host, model.task, model.died_s = State.READY, host, None, None
        model.load_s = time.monotonic() - began_s
        model.last_used_s = time.monotonic()
        model.kv_tokens = host.info.kv_tokens
        self._ledger.loaded(model, 0)
        self._send_floors()
        self._send_all(model)
        if self._opener.has_processes:
            measured = await asyncio.to_thread(measure_processes)
            if model.host is host:
                self._ledger.loaded(model, measured.get(host.pid or 0, 0))

    def _died(self, model: Model, why: str) -> None:
        """Its requests wait for the next process; a request that killed two ends."""
        if model.host is None:
            return
        sent = [request for request in self._started(model) if request.key in model.sent]
        model.forget_host()
        model.died_s = time.monotonic()
        guilty = [request for request in sent if request.repute.accuse(len(request.answer))]
        counts = len(sent) - len(guilty), len(guilty)
        log.error("%s: %s; %d requests go on when it is back, %d end", model.found.path, why, *counts)
        self._on.failed(guilty, Code.FAULT, f"{why}; {_GUILTY}")
        level = max((request.level for request in self._started(model)), default=None)
        if level is not None and model.state is State.ABSENT:
            self._load(model, level)

    def _fail(self, model: Model, code: Code, why: str) -> None:
        self._on.failed(self._sessions.unfinished(model.key), code, why)

    def _evict(self, model: Model) -> asyncio.Task[None]:
        self.num_evictions += 1
        task = self._unload(model)
        self._fail(model, Code.NOMEM, "memory is short")
        return task

    def _unload(self, model: Model) -> asyncio.Task[None]:
        """READY or LOADING -> ABSENT. The task ends when the memory has been freed."""
        host, loading = model.host, model.task
        model.task = None
        model.forget_host()
        task = asyncio.get_running_loop().create_task(close_host(host, loading))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    # -- time passes

    def take_measured(self, measured: dict[int, int]) -> None:
        """Take measured process sizes. Unloads idle models if all models may exceed the configured budget."""
        self._ledger.take(measured, list(self._models.values()))
        if self._settings.budget_bytes is None:
            return
        idle = [model for model in self._models.values() if model.state is State.READY and not self._is_busy(model)]
        for model in sorted(idle, key=lambda model: model.last_used_s):
            if sum(model.held_bytes for model in self._models.values()) <= self._budget():
                return
            self._evict(model)

    def _is_busy(self, model: Model) -> bool:
        return bool(self._sessions.unfinished(model.key))

    def tick(self, interval_s: float = 0.0, fired: int = 0) -> None:
        """Unload idle models, follow the pressure ladder. Called several times a second, and when a trigger fires."""
        now_s = time.monotonic()
        for model in list(self._models.values()):
            if self._is_busy(model):
                if model.host is not None and interval_s:
                    model.host.watch(interval_s)
                continue
            sessions = self._sessions.of_model(model.key)
            if now_s - model.last_used_s >= self._keep_s([session.keep_alive_s for session in sessions]):
                if model.state is not State.ABSENT:
                    self._unload(model)
                if not sessions:
                    model.files.close()
                    del self._models[model.key]
        level = self.ladder.update(read_memory(self._settings.psi_file), now_s, fired)
        if level >= 1:
            for model in list(self._models.values()):
                if model.state is State.READY and not self._is_busy(model):
                    self._evict(model)
        self._follow(level, now_s)

    def _keep_s(self, kept_s: list[float | None]) -> float:
        """Seconds that an idle model is kept: its sessions' `kept_s` (None = default), or LINGER_S without any."""
        idle_s = self._settings.idle_unload_s
        return max(idle_s if asked_s is None else asked_s for asked_s in kept_s) if kept_s else min(LINGER_S, idle_s)

    def _follow(self, level: int, now_s: float) -> None:
        """Level 2 pauses BACKGROUND and UTILITY, and ends BACKGROUND requests when that did not help."""
        if level < 2:
            self._shed_at_s = None
        elif self._shed_at_s is None:
            self._shed_at_s = now_s + SHED_AFTER_S
        elif now_s >= self._shed_at_s:
            low = [request for request in self._sessions.unfinished() if request.level == Level.BACKGROUND]
            for request in low:
                self._abandon(request)
            self._on.failed(low, Code.NOMEM, "memory is short")
        paused_below = Level.UTILITY if self.power_reason else Level.BACKGROUND
        self._hard_floor = Level.DEFAULT if level >= 2 else paused_below
        self._send_floors()
        for model in list(self._models.values()):
            self._send_all(model)

    def _abandon(self, request: Request) -> None:
        model = self._models[request.session.model]
        model.sent.discard(request.key)
        if model.host is not None:
            model.host.send(Abort(request.key))

    def _send_floors(self) -> None:
        """Tell each host which class is served on this device now."""
        ready = {model.key: model for model in self._models.values() if model.host is not None}
        served = (r.level for r in self._sessions.started() if r.session.model in ready)
        top, level = max(served, default=Level.BACKGROUND), self.ladder.level
        floor = Floor(int(top), int(self._hard_floor), level >= 2, level >= 1)
        for model in ready.values():
            if model.host is not None and model.floor != floor:
                model.floor = floor
                model.host.send(floor)

    # -- for people

    def status(self) -> dict[str, Any]:
        """For `gewu status`, JSON-ready."""
        return {
            "models": [model.describe(len(self._sessions.of_model(model.key))) for model in self._models.values()],
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

    def why_waiting(self, level: Level) -> str | None:
        """Why requests of this class are paused; None = they are not."""
        if level >= self._hard_floor:
            return None
        return "memory is short" if self.ladder.level >= 2 else self.power_reason

    def kv_bytes(self, session: Session) -> int:
        """KV cache bytes of the session's running request; what earlier requests left may be overwritten."""
        host = self._models[session.model].host
        if host is None or not host.info.kv_tokens:
            return 0
        return host.held_tokens.get(session.salt, 0) * host.info.kv_bytes // host.info.kv_tokens

    async def close(self) -> None:
        """Unload everything."""
        for model in list(self._models.values()):
            self._unload(model)
            model.files.close()
        self._models.clear()
        while self._closing:
            await asyncio.gather(*self._closing)


def _no_room(num_tokens: int, need: int) -> Refused:
    return Refused(Code.NOMEM, f"the KV cache holds {num_tokens} tokens, {need} are needed")
