"""A server over a real model, in this process, that tells what each answer took."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvloom.contract.config import EngineConfig
from kvloom.engine.text.tokenizer import load_tokenizer
from kvloom.rank.loading import open_runner
from kvloom.rank.runner import ModelRunner
from kvloom.server.observe.tracing import Trace
from tests.support.scripted import Turn, Turns
from tests.support.servers import FakeServer, fake_server

_BODY: ContextVar[list[bytes]] = ContextVar("body")


class _Recorder:
    """A Tracer: an answer's prompt is the body of its request."""

    def __init__(self) -> None:
        self.turns = Turns()

    def ended(self, trace: Trace) -> None:
        asked = b"".join(_BODY.get()).decode()
        with self.turns.lock:
            self.turns.items.append(Turn(asked, "", trace.num_prompt_tokens, trace.num_cached_tokens))

    def close(self) -> None:
        pass


def _keeping_body(app: ASGIApp) -> ASGIApp:
    """ASGI: sets _BODY to what comes of the request."""

    async def kept(scope: Scope, receive: Receive, send: Send) -> None:
        body = list[bytes]()
        _BODY.set(body)

        async def receive_kept() -> Message:
            message = await receive()
            body.append(message.get("body", b""))
            return message

        await app(scope, receive_kept, send)

    return kept


@contextmanager
def traced_server(path: Path, max_len: int, **more: Any) -> Iterator[tuple[FakeServer, Turns]]:
    """A server of the model at `path`, which samples as its files advise."""
    tokenizer, recorder = load_tokenizer(path), _Recorder()

    def make(config: EngineConfig) -> ModelRunner:
        config = replace(config, model=str(path), backend="cpu", max_seq_len=max_len, num_blocks=None)
        return open_runner(config, sorted(tokenizer.eos_ids), lambda done, total: None)

    shared = {"max_seq_len": max_len, "make_runner": make, "tracer": recorder, "wrap": _keeping_body}
    with fake_server(tokenizer=tokenizer, **shared, **more) as server:
        yield server, recorder.turns
