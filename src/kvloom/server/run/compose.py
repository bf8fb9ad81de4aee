"""Composition root: configuration and engines -> dialects, app -> a server that runs until a signal."""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp

from kvloom.contract.errors import BadRequest
from kvloom.net.listening import bracketed
from kvloom.server.config.settings import ServerConfig
from kvloom.server.dialects.operators.status import Control
from kvloom.server.http.app import AppSettings, make_app
from kvloom.server.http.draining import DrainingServer
from kvloom.server.http.parsing import Parsing
from kvloom.server.http.slow import BodyTimeoutMiddleware, GuardedProtocol
from kvloom.server.keeping.store import ResponseStore
from kvloom.server.observe.tracers import open_tracer
from kvloom.server.observe.tracing import CallerMiddleware, Tracer
from kvloom.server.run.guards import guard, policy_of
from kvloom.server.run.kvnote import advice_note, form_note, kv_note, weights_note
from kvloom.server.run.loading import Loaded, Opening
from kvloom.server.run.mount import make_dialects
from kvloom.server.secure.api_keys import KeyRing
from kvloom.server.serving.admission import Admission
from kvloom.server.serving.card import ModelCard
from kvloom.server.serving.engine import EngineLike
from kvloom.server.serving.health import Health
from kvloom.server.serving.pictures.service import PictureService
from kvloom.server.serving.registry import Models
from kvloom.server.serving.service import GenerationService
from kvloom.server.serving.vision.hosts import image_hosts

if TYPE_CHECKING:
    from kvloom.server.secure.tls import ServerContext

_SPARE_S = 1.0  # pause that gives the first requests the machine, before the process for large bodies is started
READY_LINE = "Daemon start success!"


def run(
    config: ServerConfig,
    loading: Opening,
    listeners: Sequence[socket.socket],
    hold_signals: Callable[[], bool] = lambda: False,
) -> None:
    """Serve until a signal. Raises UserError when something cannot be opened, a model among it.

    `hold_signals`: from its call on early signals are only noted; it returns whether one has come.
    """
    tls = _secure().tls_context(config.tls) if config.tls else None
    with contextlib.ExitStack() as stack:
        tracer = open_tracer(config.otlp_endpoint, os.environ)
        if tracer is not None:
            stack.callback(tracer.close)
        store = None
        if config.response_store is not None:
            store = ResponseStore(config.response_store, config.response_limits)
            stack.callback(store.close)
        ports = [listener.getsockname()[1] for listener in listeners]
        server = _make_server(config, _Parts(loading, hold_signals, ports, tls, tracer, store))
        gc.freeze()  # objects loaded by now are never garbage, so they are not scanned again
        gc.enable()
        if not hold_signals():
            server.run(sockets=list(listeners))
        server.check()


@dataclass(frozen=True, slots=True)
class _Parts:
    """Parts of a server besides its configuration."""

    loading: Opening
    hold_signals: Callable[[], bool]
    ports: Sequence[int]
    tls: "ServerContext | None"
    tracer: Tracer | None
    store: ResponseStore | None


def _make_server(config: ServerConfig, parts: _Parts) -> DrainingServer:
    ports, tls, admission = parts.ports, parts.tls, Admission(config.max_link_num, config.max_queued_tokens)
    models = Models([], config.options, dict.fromkeys(card.name for card in config.pictures), admission)
    health, parsing = Health(models, is_loading=True), Parsing(models, config.num_parsers)
    server: DrainingServer | None = None

    def on_start() -> None:
        assert server is not None
        _heed_signals(server, parts)

    async def load() -> str:
        loaded = await asyncio.wrap_future(parts.loading.models)
        for card, engine, tokenizer in loaded.models:
            service = GenerationService(card, engine, tokenizer, admission, parts.tracer)
            models.add(service)
            await asyncio.to_thread(_load_adapters, models, service, card, engine)
        for _, engine, _ in loaded.models:
            engine.start(asyncio.get_running_loop())
        for picture_card, painter in loaded.pictures:
            painter.begin()
            models.add_pictures(PictureService(picture_card, painter))
        asyncio.get_running_loop().call_later(_SPARE_S, parsing.start)
        health.is_loading = False
        notes = [
            advice_note(service.name, service.card.advice)
            + form_note(service.card, service.tokenizer)
            + weights_note(service.name, service.engine.info)
            + kv_note(service.name, service.engine.info, service.card.engine)
            for service in models
        ]
        return f"{READY_LINE}\n{''.join(notes)}{_greeting(config, ports[0], loaded)}{loaded.note}"

    async def stop(grace_s: float | None) -> None:
        assert server is not None
        await server.stop(config.grace_s if grace_s is None else grace_s)

    dialects = make_dialects(models, health, Control(stop, f"{config.host}:{ports[0]}"), config, parts.store)
    app_settings = AppSettings(
        config.max_body_bytes,
        on_start,
        management_port=ports[1] if config.management else None,
        metrics_port=ports[-1] if config.metrics else None,
        image_hosts=image_hosts(config.image_hosts),
    )
    app: ASGIApp = make_app(health, dialects, app_settings, parsing)
    if parts.tracer is not None:
        app = CallerMiddleware(app)
    keys = KeyRing(config.api_key_hashes) if config.api_key_hashes else None
    app = guard(BodyTimeoutMiddleware(app), policy_of(config), keys)
    settings = uvicorn.Config(
        app,
        http=GuardedProtocol,
        ssl_context_factory=None if tls is None else lambda settings, default: tls,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    server = DrainingServer(settings, health, parts.loading.opened, config.grace_s, load)
    return server


def _heed_signals(server: DrainingServer, parts: _Parts) -> None:
    """SIGHUP reloads the TLS files; without TLS it stops the server as SIGTERM does. Called on the server's loop."""
    loop = asyncio.get_running_loop()
    if parts.tls is not None:
        _secure().reload_on_sighup(parts.tls, loop)
    elif threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        loop.add_signal_handler(signal.SIGHUP, server.handle_exit, signal.SIGHUP, None)
    if parts.hold_signals():
        server.handle_exit(signal.SIGTERM, None)


def _secure() -> Any:
    """Imported on demand, because a server without TLS does not need it."""
    return import_module("kvloom.server.secure.tls")


def _load_adapters(models: Models, service: GenerationService, card: ModelCard, engine: EngineLike) -> None:
    """Load the adapters of the configuration. Raises BadRequest, ModelError."""
    for name, path in card.lora_modules:
        try:
            adapter = engine.preload_adapter(str(path.resolve()))
        except BadRequest as error:
            raise BadRequest("loraModules", f"{name}={path}: {error.problem}") from None
        models.put_adapter(service.with_adapter(name, str(path), adapter.id))


def _greeting(config: ServerConfig, port: int, loaded: Loaded) -> str:
    host = bracketed("127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host)
    scheme = "http" if config.tls is None else "https"
    options = "" if config.tls is None else " --cacert CA --cert CERT --key KEY"
    options += " -H 'Authorization: Bearer KEY'" if config.api_key_hashes else ""
    path, body = first_request(loaded)
    names = ", ".join(config.names) + (" is" if len(config.names) == 1 else " are")
    return (
        f"{names} served on {scheme}://{host}:{port}. Try:\n"
        f"  curl{options} {scheme}://{host}:{port}/v1/{path} -H 'Content-Type: application/json' -d "
        f"""'{{"model": "{config.names[0]}", {body}}}'"""
    )


def first_request(loaded: Loaded) -> tuple[str, str]:
    """A path below /v1 that the first model answers, and an example body without the model's name."""
    if not loaded.models:
        return "images/generations", '"prompt": "a lighthouse"'
    info = loaded.models[0][1].info
    if "generation" not in info.lacks:
        return "chat/completions", '"messages": [{"role": "user", "content": "Hello!"}], "temperature": 0'
    return "classify" if info.labels else "embeddings", '"input": "Hello!"'
