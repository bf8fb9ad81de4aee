"""Real HTTP servers on free ports, over the fake model in this process, or over vLLM (vllm/hosts.py)."""

import asyncio
import http.client
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module

import httpx
import msgspec
import pytest
import uvicorn
from starlette.types import ASGIApp

from kvloom.contract.config import EngineConfig
from kvloom.contract.messages import Batch, Runner
from kvloom.contract.sampling import SamplingParams
from kvloom.contract.tokenizer import Tokenizer
from kvloom.engine.engine import Engine
from kvloom.engine.link.executor import InProcessExecutor, RankDied
from kvloom.engine.thread import EngineThread
from kvloom.net.listening import listen
from kvloom.net.sites import Policy
from kvloom.rank.fake import ByteTokenizer, FakeRunner, fake_answer
from kvloom.rank.grammar.guides import Guides
from kvloom.server.config.settings import ServerConfig
from kvloom.server.dialects.operators.status import Control
from kvloom.server.http.app import AppSettings, make_app
from kvloom.server.http.parsing import Parsing
from kvloom.server.keeping.store import ResponseStore
from kvloom.server.observe.tracing import CallerMiddleware, Tracer
from kvloom.server.run.guards import guard, policy_of
from kvloom.server.run.mount import make_dialects
from kvloom.server.secure.api_keys import KeyRing, hash_key
from kvloom.server.secure.tls import ServerContext
from kvloom.server.serving.admission import Admission
from kvloom.server.serving.card import ModelCard
from kvloom.server.serving.health import Health
from kvloom.server.serving.options import WireOptions
from kvloom.server.serving.registry import Models
from kvloom.server.serving.service import GenerationService
from tests.support.asgi import PromptServer, in_thread
from tests.support.vllm.serving import OVER_VLLM
from tests.support.waiting import until

MODEL = "mock"
LIMIT_S = 120.0


class FakeExecutor(InProcessExecutor):
    """Restarts as ranks do: with a new, empty runner. `failing`: raised once by a restart; `dies`: the next step
    kills it.
    """

    def __init__(self, make: Callable[[], Runner]) -> None:
        super().__init__(make())
        self._make = make
        self.failing: list[Exception] = []
        self.dies = threading.Event()

    def submit(self, batch: Batch) -> None:
        if self.dies.is_set():
            self.dies.clear()
            raise RankDied("killed by a test")
        super().submit(batch)

    def restart(self) -> None:
        if self.failing:
            raise self.failing.pop()
        super().__init__(self._make())


@dataclass(slots=True)
class FakeServer:
    url: str
    engine: EngineThread
    health: Health
    client: httpx.Client
    parsing: Parsing

    @property
    def executor(self) -> FakeExecutor:
        """The executor of the fake model."""
        if not isinstance(self.engine._executor, FakeExecutor):
            pytest.skip("does something to the fake model")
        return self.engine._executor

    @property
    def admission(self) -> Admission:
        return self.health.models.admission

    def post(self, path: str, body: object = None, **kwargs: object) -> httpx.Response:
        return self.client.post(path, json=body, **kwargs)

    def chat(self, text: str = "hi", **fields: object) -> httpx.Response:
        return self.post(
            "/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
        )

    def complete(self, prompt: object = "hi", **fields: object) -> httpx.Response:
        return self.post("/v1/completions", {"model": MODEL, "prompt": prompt, **fields})

    def num_begun(self) -> int:
        """How many answers have their first token, according to the service."""
        return self.health.models.default.meter.first_token.count

    def leave(self, path: str, body: object, when: Callable[[], bool] | None = None) -> None:
        """Sends a request and disconnects without its answer once the condition holds, or at its first token."""
        begun = self.num_begun()
        host, port = self.url.removeprefix("http://").split(":")
        leaving = http.client.HTTPConnection(host, int(port), timeout=LIMIT_S)
        leaving.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        until(when or (lambda: self.num_begun() > begun))
        leaving.close()


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
    tokenizer: Tokenizer | None = None,
    max_seq_len: int = 2048,
    policy: Policy | None = None,
    card: Mapping[str, object] | None = None,
    store: ResponseStore | None = None,
    wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    make_runner: Callable[[EngineConfig], Runner] | None = None,
    **config: object,
) -> Iterator[FakeServer]:
    """All `names` are served by one engine; without `has_eos` answers end at their length only.

    `keys`: API keys, one of which every request needs; `policy`: origins of pages that may call; `wrap`: middleware
    around the app; `make_runner`: another model. `config` goes into EngineConfig, `card` into ModelCard; guesses follow
    the clock and are off. Requests without a seed repeat their answers, unless `seed` is None; one in 97 ends it.
    """
    tokenizer = tokenizer or ByteTokenizer()
    if not has_eos:
        tokenizer.eos_ids = frozenset()
    engine_config = EngineConfig(backend="fake", **{"seed": 0, "num_speculative_tokens": 0, **config})
    shape = EngineConfig(backend="fake", num_blocks=512, max_seq_len=max_seq_len, fake_step_s=step_s)
    engine = _engine(engine_config, shape, tokenizer, make_runner)
    made: list[FakeServer] = []

    def on_start() -> None:
        engine.start(asyncio.get_running_loop())

    def build() -> PromptServer:
        admission = Admission(max_link_num, max_queued_tokens)
        cards = [ModelCard(name, engine_config, **card or {}) for name in names]
        services = [GenerationService(card, engine, tokenizer, admission, tracer) for card in cards]
        models = Models(services, replace(options or WireOptions(), keeps_responses=store is not None))
        health = Health(models)
        client = httpx.Client(base_url=url, timeout=LIMIT_S)
        made.append(FakeServer(url, engine, health, client, Parsing(models)))
        shown = ServerConfig(tuple(cards), api_key_hashes=tuple(hash_key(key) for key in keys))
        dialects = make_dialects(models, health, Control(partial(_drain, health), "test"), shown, store)
        app = make_app(health, dialects, AppSettings(max_body_bytes, on_start), made[0].parsing)
        app = wrap(guard(app, policy or policy_of(shown), KeyRing(shown.api_key_hashes) if keys else None))
        return _server(app if tracer is None else CallerMiddleware(app), tls)

    with listen("127.0.0.1", 0) as listener:
        url = f"{'https' if tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
        try:
            with in_thread(build(), listener), made[0].client:
                yield made[0]
        finally:
            for each in made:
                each.parsing.close()
            engine.close()


def greedy_answer(prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    """The model's answer, whichever engine computes it."""
    if OVER_VLLM:
        found: list[int] = import_module("tests.support.models.chained_llama").chained_answer(prompt_ids, num_tokens)
        return found
    return fake_answer(prompt_ids, SamplingParams(temperature=0), 0, num_tokens)


def _engine(
    config: EngineConfig, shape: EngineConfig, tokenizer: Tokenizer, make: Callable[[EngineConfig], Runner] | None
) -> EngineThread:
    """`shape`: of the fake model; vLLM only uses its length."""
    if OVER_VLLM:
        lend = import_module("tests.support.vllm.hosts").vllm_engine
        return EngineThread(*lend(replace(config, max_seq_len=shape.max_seq_len), tokenizer))
    executor = FakeExecutor(partial(make, shape) if make else partial(_runner, shape, tokenizer))
    return EngineThread(Engine(config, executor, tokenizer), executor)


def _runner(shape: EngineConfig, tokenizer: Tokenizer) -> FakeRunner:
    """The fake model over a tokenizer: it writes the ids of its own letters, unless a grammar says otherwise."""
    if isinstance(tokenizer, ByteTokenizer):
        return FakeRunner(shape)
    runner = FakeRunner(shape, guides=Guides(lambda: tokenizer, tokenizer.vocab_size))
    runner.info = msgspec.structs.replace(runner.info, vocab_size=tokenizer.vocab_size)
    return runner


def _server(app: ASGIApp, tls: ServerContext | None) -> PromptServer:
    factory = None if tls is None else lambda settings, default: tls
    settings = uvicorn.Config(app, log_level="warning", access_log=False, ws="none", ssl_context_factory=factory)
    return PromptServer(settings)


async def _drain(health: Health, grace_s: float | None) -> None:
    health.is_draining = True
    while health.models.admission.num_active:
        await asyncio.sleep(0.01)
