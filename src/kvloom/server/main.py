"""Composition root: configuration -> tokenizers, engines, app -> a server on its sockets."""

import asyncio
import contextlib
import functools
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvicorn
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from kvloom.engine.errors import BadRequest, ModelError
from kvloom.engine.fake import ByteTokenizer
from kvloom.engine.thread import EngineThread, open_engine
from kvloom.engine.tokenizer import Tokenizer, load_tokenizer
from kvloom.server.admission import Admission
from kvloom.server.api.console import OPEN_PATHS as CONSOLE_PATHS
from kvloom.server.api.lora import check_name
from kvloom.server.app import make_app
from kvloom.server.auth import ApiKeyMiddleware, KeyRing, check_bind
from kvloom.server.browser import BrowserMiddleware
from kvloom.server.card import ModelCard
from kvloom.server.config import ServerConfig
from kvloom.server.dialects import make_dialects
from kvloom.server.draining import DrainingServer
from kvloom.server.generation import GenerationService
from kvloom.server.health import Health
from kvloom.server.models import Models
from kvloom.server.slow import BodyTimeoutMiddleware, GuardedProtocol
from kvloom.server.tls import ServerContext, reload_on_sighup, tls_context
from kvloom.server.tracers import open_tracer
from kvloom.server.tracing import CallerMiddleware, Tracer

log = logging.getLogger(__name__)

READY_LINE = "Daemon start success!"
# answered without an API key
OPEN_PATHS = ("/health", "/ping", "/v2/health/live", "/v2/health/ready", "/openapi.json", "/docs", *CONSOLE_PATHS)


def serve(config: ServerConfig) -> None:
    """Serve until a signal. Raises ServingError, TlsError or AccessError, one sentence, before anything is served."""
    check_bind(config.host, config.allows_all_addresses)
    tls = tls_context(config.tls) if config.tls else None
    keys = KeyRing(config.api_key_hashes) if config.api_key_hashes else None
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(_listener(host, port)) for host, port in config.addresses]
        stack.enter_context(_pid_file(config.pid_file))
        tracer = open_tracer(config.otlp_endpoint, os.environ)
        if tracer is not None:
            stack.callback(tracer.close)
        engines = []
        for card in config.models:
            tokenizer, engine = _open_engine(card)
            stack.callback(engine.close)
            engines.append((card, engine, tokenizer))
        ports = [listener.getsockname()[1] for listener in listeners]
        server = _make_server(config, engines, tls, keys, ports, tracer)
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=listeners)


def _make_server(
    config: ServerConfig,
    engines: Sequence[tuple[ModelCard, EngineThread, Tokenizer | ByteTokenizer]],
    tls: ServerContext | None,
    keys: KeyRing | None,
    ports: Sequence[int],
    tracer: Tracer | None,
) -> DrainingServer:
    admission = Admission(config.max_link_num, config.max_queued_tokens)
    services = [GenerationService(card, engine, tokenizer, admission, tracer) for card, engine, tokenizer in engines]
    models = Models(services, config.options)
    for service, (card, engine, _) in zip(services, engines, strict=True):
        _load_adapters(models, service, card, engine)
    health = Health(models)
    server: DrainingServer | None = None

    def on_start() -> None:
        loop = asyncio.get_running_loop()
        for _, engine, _ in engines:
            engine.start(loop)
        if tls is not None:
            reload_on_sighup(tls, loop)

    async def stop(grace_s: float | None) -> None:
        assert server is not None
        await server.stop(config.grace_s if grace_s is None else grace_s)

    dialects = make_dialects(models, health, stop, config, f"{config.host}:{ports[0]}")
    management_port = ports[1] if len(ports) > 1 else None
    app: ASGIApp = make_app(health, dialects, config.max_body_bytes, on_start, management_port)
    if tracer is not None:
        app = CallerMiddleware(app)
    app = BodyTimeoutMiddleware(app)
    if config.cors_origins:
        app = CORSMiddleware(app, config.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    if keys is not None:
        app = ApiKeyMiddleware(app, keys, open_paths=OPEN_PATHS)
    app = BrowserMiddleware(app)
    settings = uvicorn.Config(
        app,
        http=GuardedProtocol,
        ssl_context_factory=None if tls is None else lambda settings, default: tls,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    greeting = f"{READY_LINE}\n{_greeting(config, ports[0])}"
    server = DrainingServer(settings, health, [engine for _, engine, _ in engines], config.grace_s, greeting)
    return server


def _load_adapters(models: Models, service: GenerationService, card: ModelCard, engine: EngineThread) -> None:
    """Those of the configuration. Raises BadRequest, ModelError."""
    for name, path in card.lora_modules:
        try:
            check_name(name)
            models.check_adapter_name(name, is_replacing=False)
            adapter = engine.preload_adapter(str(path.resolve()))
        except BadRequest as error:
            raise BadRequest("loraModules", f"{name}={path}: {error.problem}") from None
        models.put_adapter(service.with_adapter(name, str(path), adapter.id))


@contextlib.contextmanager
def _listener(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket, before the model is loaded. Raises ModelError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ModelError(f"{host}:{port} cannot be listened on: {error.strerror}; choose another --port") from None
        yield listener


@contextlib.contextmanager
def _pid_file(path: Path | None) -> Iterator[None]:
    """This process's number in a file while it serves. Raises BadRequest when it cannot be written."""
    if path is None:
        yield
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{os.getpid()}\n")
    except OSError as error:
        raise BadRequest("pid-file", f"{path} cannot be written: {error.strerror}") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _open_engine(card: ModelCard) -> tuple[Tokenizer | ByteTokenizer, EngineThread]:
    """The engine with its model loaded, a progress bar meanwhile when someone looks at a terminal."""
    load = functools.cache(lambda: load_tokenizer(card.engine.model) if card.engine.model else ByteTokenizer())
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"loading {card.name}", total=None)
        engine = open_engine(card.engine, load, lambda done, total: bar.update(task, completed=done, total=total))
    return load(), engine


def _greeting(config: ServerConfig, port: int) -> str:
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
    scheme = "http" if config.tls is None else "https"
    options = "" if config.tls is None else " --cacert CA --cert CERT --key KEY"
    options += " -H 'Authorization: Bearer KEY'" if config.api_key_hashes else ""
    names = ", ".join(card.name for card in config.models)
    return (
        f"{names} {'is' if len(config.models) == 1 else 'are'} served on {scheme}://{host}:{port}. Try:\n"
        f"  curl{options} {scheme}://{host}:{port}/v1/chat/completions -H 'Content-Type: application/json' -d "
        f"""'{{"model": "{config.models[0].name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'"""
    )
