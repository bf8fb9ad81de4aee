"""Large answers are formatted in a thread beside the event loop, with the same result."""

import asyncio
import threading
from typing import Any

import pytest

from kvloom.server.http import formatting
from kvloom.server.http.formatting import INLINE_ITEMS, formatted
from tests.support.servers import fake_server

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}
TEXT = {"prompt": ["one", "and two"], "max_tokens": 4, "temperature": 0}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**CHAT, "n": 3, "logprobs": True, "top_logprobs": 3, "return_token_ids": True}),
    ("/v1/chat/completions", {**CHAT, "prompt_logprobs": 2}),
    ("/v1/completions", {**TEXT, "echo": True, "logprobs": 2}),
    ("/v1/completions", {**TEXT, "echo": True, "logprobs": 2, "prompt": "one", "stream": True}),
    ("/v1/completions", {**TEXT, "echo": True, "prompt_logprobs": 1, "return_token_ids": True}),
    ("/v1/embeddings", {"input": ["a", "bc"]}),
    ("/v1/embeddings", {"input": ["a", "bc"], "encoding_format": "base64", "dimensions": 4}),
    ("/api/embed", {"model": "m", "input": ["a", "bc"]}),
    ("/generate", {"inputs": "hi", "parameters": {"details": True, "decoder_input_details": True, "seed": 1}}),
]
_CHANGING = ("id", "created", "total_duration")


def answer(path: str, body: dict[str, Any]) -> object:
    with fake_server() as server:
        body = {**body, "model": server.health.models.default.name} if "model" in body else body
        reply = server.post(path, body)
        assert reply.status_code == 200, reply.text
        if body.get("stream"):
            return [line.split('"choices"')[-1] for line in reply.text.splitlines()]
        told = reply.json()
        return {key: value for key, value in told.items() if key not in _CHANGING}


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_an_answer_is_the_same_wherever_it_is_written(path, body, monkeypatch):
    inline = answer(path, body)
    threads: list[str] = []
    submit = formatting._thread.submit

    def recorded(*arguments: Any) -> Any:
        threads.append("formatting")
        return submit(*arguments)

    monkeypatch.setattr(formatting, "INLINE_ITEMS", 0)
    monkeypatch.setattr(formatting._thread, "submit", recorded)
    assert answer(path, body) == inline
    assert threads


def test_the_loop_goes_on_while_a_large_answer_is_written():
    async def main() -> bool:
        written = threading.Event()
        asyncio.get_running_loop().call_soon(written.set)  # sent only when the loop is free
        return await formatted(INLINE_ITEMS + 1, lambda: written.wait(120))

    assert asyncio.run(main())


def test_a_small_answer_is_written_at_once():
    async def main() -> int:
        return await formatted(INLINE_ITEMS, threading.get_ident)

    assert asyncio.run(main()) == threading.get_ident()
