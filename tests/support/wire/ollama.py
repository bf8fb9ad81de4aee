"""Requests to Ollama's /api."""

import json
from typing import Any

from kvloom.contract.sampling import SamplingParams
from kvloom.rank.fake import ByteTokenizer, fake_answer
from tests.support.servers import MODEL, FakeServer

HELLO = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0, "num_predict": 12}


def prompt_of(*messages: tuple[str, str]) -> str:
    return ByteTokenizer().apply_chat_template([{"role": role, "content": text} for role, text in messages])


def truth(prompt: str, count: int) -> str:
    ids = ByteTokenizer().encode(prompt)
    return ByteTokenizer().decode(fake_answer(ids, SamplingParams(temperature=0), 0, count))


def lines(server: FakeServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = server.post(path, {"model": MODEL, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in response.text.splitlines()]


def whole(server: FakeServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(path, {"model": MODEL, "stream": False, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("application/json")
    return response.json()


def error(server: FakeServer, path: str, body: dict[str, Any], status: int = 400) -> str:
    response = server.post(path, {"model": MODEL, **body})
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    return response.json()["error"]
