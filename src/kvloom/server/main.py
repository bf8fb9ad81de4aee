"""Composition root: configuration -> tokenizer, engine, app -> a server on a socket."""

import asyncio
import contextlib
import logging
import socket
import sys
import time
from types import FrameType

import uvicorn
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from starlette.types import ASGIApp

from kvloom.engine.errors import ModelError
from kvloom.engine.fake import ByteTokenizer
from kvloom.engine.thread import EngineThread, open_engine
from kvloom.engine.tokenizer import Tokenizer, load_tokenizer
from kvloom.server.api.openai import OpenAI
from kvloom.server.app import Health, make_app
from kvloom.server.auth import ApiKeyMiddleware, KeyRing, check_bind
from kvloom.server.config import ServerConfig
from kvloom.server.generation import GenerationService
from kvloom.server.slow import BodyTimeoutMiddleware, GuardedProtocol
from kvloom.server.tls import ServerContext, reload_on_sighup, tls_context

READY_LINE = "Daemon start success!"
OPEN_PATHS = ("/health",)  # answered without an API key
_DRAIN_POLL_S = 0.05
_FAREWELL_S = 1.0  # for the last events of requests that were cut off


class DrainingServer(uvicorn.Server):
    """On the first signal new requests are refused and running ones finish; then, or after `grace_s`, it stops.

    A second signal stops at once.
    """

    def __init__(
        self, config: uvicorn.Config, health: Health, engine: EngineThread, grace_s: float, greeting: str
    ) -> None:
        super().__init__(config)
        self._health, self._engine = health, engine
        self._grace_s, self._greeting = grace_s, greeting
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(f"{READY_LINE}\n{self._greeting}", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn on SIGTERM and SIGINT. Its own method would end the process by the signal, not with 0."""
        if self._health.is_draining:
            self.should_exit = self.force_exit = True
        else:
            self._health.is_draining = True
            self._drain = asyncio.get_running_loop().create_task(self._stop_when_idle())

    async def _stop_when_idle(self) -> None:
        await self._wait_idle(self._grace_s)
        await asyncio.to_thread(self._engine.close)  # what still runs ends with an error, which clients are told
        await self._wait_idle(_FAREWELL_S)
        self.should_exit = True

    async def _wait_idle(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while self._health.service.admission.num_active and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)


def serve(config: ServerConfig) -> None:
    """Serve until a signal. Raises ServingError, TlsError or AccessError, one sentence, before anything is served."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    check_bind(config.host, config.allows_all_addresses)
    tls = tls_context(config.tls) if config.tls else None
    keys = KeyRing(config.api_key_hashes) if config.api_key_hashes else None
    listener = _bind(config.host, config.port)
    tokenizer = load_tokenizer(config.engine.model) if config.engine.model else ByteTokenizer()
    engine = _open_engine(config, tokenizer)
    try:
        server = _make_server(config, engine, tokenizer, tls, keys, listener.getsockname()[1])
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
    finally:
        engine.close()
        listener.close()


def _make_server(
    config: ServerConfig,
    engine: EngineThread,
    tokenizer: Tokenizer | ByteTokenizer,
    tls: ServerContext | None,
    keys: KeyRing | None,
    port: int,
) -> DrainingServer:
    service = GenerationService(engine, tokenizer, config.max_link_num)
    openai = OpenAI(service, config.served_model_name, config.validates_model)

    def on_start() -> None:
        loop = asyncio.get_running_loop()
        engine.start(loop)
        if tls is not None:
            reload_on_sighup(tls, loop)

    app: ASGIApp
    app, health = make_app(service, [openai], config.max_body_bytes, on_start)
    app = BodyTimeoutMiddleware(app)
    if keys is not None:
        app = ApiKeyMiddleware(app, keys, open_paths=OPEN_PATHS)
    settings = uvicorn.Config(
        app,
        http=GuardedProtocol,
        ssl_context_factory=None if tls is None else lambda settings, default: tls,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    return DrainingServer(settings, health, engine, config.grace_s, _greeting(config, port))


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket, before the model is loaded. Raises ModelError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ModelError(f"{host}:{port} cannot be listened on: {error.strerror}; choose another --port") from None
    return listener


def _open_engine(config: ServerConfig, tokenizer: Tokenizer | ByteTokenizer) -> EngineThread:
    """The engine with its model loaded, a progress bar meanwhile when someone looks at a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"loading {config.served_model_name}", total=None)
        return open_engine(config.engine, tokenizer, lambda done, total: bar.update(task, completed=done, total=total))


def _greeting(config: ServerConfig, port: int) -> str:
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
    scheme = "http" if config.tls is None else "https"
    options = "" if config.tls is None else " --cacert CA --cert CERT --key KEY"
    options += " -H 'Authorization: Bearer KEY'" if config.api_key_hashes else ""
    return (
        f"{config.served_model_name} is served on {scheme}://{host}:{port}. Try:\n"
        f"  curl{options} {scheme}://{host}:{port}/v1/chat/completions -H 'Content-Type: application/json' -d "
        f"""'{{"model": "{config.served_model_name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'"""
    )
