"""Real HTTP servers on free ports, over the fake model in this process."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import uvicorn

from kvloom.engine.config import EngineConfig
from kvloom.engine.engine import Engine
from kvloom.engine.executor import InProcessExecutor
from kvloom.engine.fake import ByteTokenizer, FakeRunner
from kvloom.engine.thread import EngineThread
from kvloom.server.api.openai import OpenAI
from kvloom.server.app import Health, make_app
from kvloom.server.generation import GenerationService

MODEL = "mock"
LIMIT_S = 10.0


@dataclass(slots=True)
class FakeServer:
    url: str
    engine: EngineThread
    health: Health
    client: httpx.Client

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
    validates_model: bool = True,
    step_s: float = 0.0,
    **config: object,
) -> Iterator[FakeServer]:
    """`config` goes into EngineConfig."""
    runner = FakeRunner(num_blocks=512, max_seq_len=2048, step_s=step_s)
    executor = InProcessExecutor(runner)
    tokenizer = ByteTokenizer()
    engine = EngineThread(Engine(EngineConfig(backend="fake", **config), executor, tokenizer), executor)  # type: ignore[arg-type]
    app_started = threading.Event()
    made: list[Health] = []

    def on_start() -> None:
        engine.start(asyncio.get_running_loop())
        app_started.set()

    def build() -> uvicorn.Server:
        service = GenerationService(engine, tokenizer, max_link_num)
        openai = OpenAI(service, MODEL, validates_model)
        app, health = make_app(service, [openai], max_body_bytes, on_start)
        made.append(health)
        return uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, ws="none"))

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = build()
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
        thread.start()
        assert app_started.wait(LIMIT_S)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
                until(lambda: server.started)
                yield FakeServer(url, engine, made[0], client)
        finally:
            server.should_exit = server.force_exit = True
            thread.join(LIMIT_S)
            engine.close()


def until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Wait for a condition that another thread or process makes true."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
