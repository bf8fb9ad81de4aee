"""Real HTTP servers on free ports, over the fake model in this process."""

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import httpx
import uvicorn
from starlette.types import ASGIApp

from kvloom.engine.config import EngineConfig
from kvloom.engine.engine import Engine
from kvloom.engine.executor import InProcessExecutor
from kvloom.engine.fake import ByteTokenizer, FakeRunner
from kvloom.engine.thread import EngineThread
from kvloom.server.admission import Admission
from kvloom.server.api.console import OPEN_PATHS as CONSOLE_PATHS
from kvloom.server.app import make_app
from kvloom.server.auth import ApiKeyMiddleware, KeyRing, hash_key
from kvloom.server.browser import BrowserMiddleware
from kvloom.server.card import ModelCard
from kvloom.server.config import ServerConfig
from kvloom.server.dialects import make_dialects
from kvloom.server.generation import GenerationService
from kvloom.server.health import Health
from kvloom.server.models import Models
from kvloom.server.options import WireOptions
from kvloom.server.tls import ServerContext
from kvloom.server.tracing import CallerMiddleware, Tracer
from tests.support.waiting import until

MODEL = "mock"
LIMIT_S = 10.0


@dataclass(slots=True)
class FakeServer:
    url: str
    engine: EngineThread
    health: Health
    client: httpx.Client

    @property
    def admission(self) -> Admission:
        return self.health.models.admission

    def post(self, path: str, body: object = None, **kwargs: object) -> httpx.Response:
        return self.client.post(path, json=body, **kwargs)  # type: ignore[arg-type]

    def chat(self, text: str = "hi", **fields: object) -> httpx.Response:
        return self.post(
            "/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
        )

    def complete(self, prompt: object = "hi", **fields: object) -> httpx.Response:
        return self.post("/v1/completions", {"model": MODEL, "prompt": prompt, **fields})


@contextmanager
def fake_server(
    max_link_num: int = 100,
    max_body_bytes: int = 1 << 20,
    options: WireOptions | None = None,
    step_s: float = 0.0,
    names: Sequence[str] = (MODEL,),
    max_queued_tokens: int | None = None,
    tls: ServerContext | None = None,
    has_eos: bool = True,
    keys: Sequence[str] = (),
    tracer: Tracer | None = None,
    tokenizer: ByteTokenizer | None = None,
    max_seq_len: int = 2048,
    **config: object,
) -> Iterator[FakeServer]:
    """All `names` are served by one engine; without `has_eos` answers end by their length only.

    `keys`: API keys, one of which is asked for. `config` goes into EngineConfig.
    """
    executor = InProcessExecutor(FakeRunner(num_blocks=512, max_seq_len=max_seq_len, step_s=step_s))
    tokenizer = tokenizer or ByteTokenizer()
    if not has_eos:
        tokenizer.eos_ids = frozenset()
    engine_config = EngineConfig(backend="fake", **config)  # type: ignore[arg-type]
    engine = EngineThread(Engine(engine_config, executor, tokenizer), executor)
    app_started = threading.Event()
    made: list[Health] = []

    def on_start() -> None:
        engine.start(asyncio.get_running_loop())
        app_started.set()

    def build() -> uvicorn.Server:
        admission = Admission(max_link_num, max_queued_tokens)
        cards = [ModelCard(name, engine_config) for name in names]
        models = Models([GenerationService(card, engine, tokenizer, admission, tracer) for card in cards], options)
        health = Health(models)
        made.append(health)
        dialects = make_dialects(models, health, partial(_drain, health), ServerConfig(tuple(cards)), "test")
        app = _guarded(make_app(health, dialects, max_body_bytes, on_start), keys)
        app = app if tracer is None else CallerMiddleware(app)
        factory = None if tls is None else lambda settings, default: tls
        settings = uvicorn.Config(app, log_level="warning", access_log=False, ws="none", ssl_context_factory=factory)
        return uvicorn.Server(settings)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = build()
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
        thread.start()
        assert app_started.wait(LIMIT_S)
        url = f"{'https' if tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
        try:
            with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
                until(lambda: server.started)
                yield FakeServer(url, engine, made[0], client)
        finally:
            server.should_exit = server.force_exit = True
            thread.join(LIMIT_S)
            engine.close()


def _guarded(app: ASGIApp, keys: Sequence[str]) -> ASGIApp:
    """As main.py does it: keys before the routes, browsers before the keys."""
    if keys:
        app = ApiKeyMiddleware(app, KeyRing([hash_key(key) for key in keys]), open_paths=CONSOLE_PATHS)
    return BrowserMiddleware(app)


async def _drain(health: Health, grace_s: float | None) -> None:
    health.is_draining = True
    while health.models.admission.num_active:
        await asyncio.sleep(0.01)
