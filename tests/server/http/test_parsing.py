"""Large bodies are parsed in a separate process: other requests do not wait for it, and it can be killed."""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvloom.processes import kinds
from kvloom.server.http import parsing
from kvloom.server.http.parsing import INLINE_BYTES
from kvloom.server.http.turns import LONG_BYTES
from kvloom.server.run.mount import make_dialects
from kvloom.server.serving.options import WireOptions
from tests.support.parsers import PidTokenizer, TroubledTokenizer
from tests.support.servers import FakeServer, fake_server
from tests.support.waiting import until

BIG = 4 << 20
LONG = "x" * INLINE_BYTES
WIDE = WireOptions(max_input_chars=BIG)


@pytest.fixture
def troubled(tmp_path: Path) -> Iterator[FakeServer]:
    with fake_server(tokenizer=TroubledTokenizer(tmp_path), max_body_bytes=BIG, options=WIDE) as running:
        yield running


def pid_of(folder: Path) -> int:
    path = folder / "pid"
    return int(until(lambda: path.exists() and path.read_text()))


def is_alive(pid: int) -> bool:
    """Whether a process runs, and is not a zombie."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_small_body_is_parsed_in_place_and_a_large_one_elsewhere():
    with fake_server(tokenizer=PidTokenizer()) as server:
        small, large, again = (
            int.from_bytes(server.post("/tokenize", {"prompt": text}).json()["tokens"], "big")
            for text in ("x", LONG, LONG)
        )
    assert small == os.getpid()
    assert large != os.getpid()
    assert again == large  # no process is started for each body


CASES: list[tuple[str, Any]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "TEXT"}], "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "TEXT"}], "max_tokens": 3, "stream": True}),
    ("/v1/completions", {"prompt": "TEXT", "max_tokens": 3, "echo": True, "return_token_ids": True}),
    ("/v1/completions", {"prompt": ["TEXT", "b"], "max_tokens": 3, "stream": True}),
    ("/v1/responses", {"input": "TEXT", "max_output_tokens": 3}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "TEXT"}], "max_tokens": 3}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "TEXT"}]}),
    ("/v1/embeddings", {"input": ["TEXT", "b"]}),
    ("/tokenize", {"prompt": "TEXT", "return_token_strs": True}),
    ("/tokenize", {"messages": [{"role": "user", "content": "TEXT"}]}),
    ("/v1/tokenizer", {"inputs": "TEXT"}),
    ("/", {"inputs": "TEXT", "parameters": {"max_new_tokens": 3, "details": True, "return_full_text": True}}),
    ("/generate", {"inputs": "TEXT", "parameters": {"max_new_tokens": 3}}),
    ("/generate", {"prompt": "TEXT", "max_tokens": 3, "temperature": 0}),
    ("/generate_stream", {"inputs": "TEXT", "parameters": {"max_new_tokens": 3}}),
    ("/infer", {"inputs": "TEXT", "parameters": {"max_new_tokens": 3}}),
    ("/v2/models/mock/generate", {"id": "one", "text_input": "TEXT", "parameters": {"max_new_tokens": 3}}),
    ("/v2/models/mock/generate_stream", {"id": "one", "text_input": "TEXT", "parameters": {"max_new_tokens": 3}}),
    ("/v2/models/mock/stopInfer", {"id": "nobody", "rest": "TEXT"}),
    ("/v1/unload_lora_adapter", {"lora_name": "nobody", "rest": "TEXT"}),
    ("/v2/models/mock/infer", {"inputs": [{"name": "a", "shape": [3], "datatype": "INT64", "data": [1, 2, 3]}]}),
    ("/infer_token", {"input_id": [1, 2, 3], "parameters": {"max_new_tokens": 3}}),
    ("/detokenize", {"tokens": [104, 105]}),
    ("/v1/completions", {"prompt": "TEXT", "max_tokens": 0}),
    ("/v1/completions", {"model": "mock", "messages": 1}),
]
VARYING = (
    "id",
    "item_id",
    "response_id",
    "created",
    "created_at",
    "first_token_cost",
    "decode_cost",
    "queue_wait_time",
    "seed",
)


@pytest.mark.parametrize(("path", "body"), CASES, ids=[f"{i}-{path}" for i, (path, _) in enumerate(CASES)])
def test_an_answer_is_the_same_wherever_its_body_was_parsed(
    path: str, body: Any, server: FakeServer, monkeypatch: pytest.MonkeyPatch
):
    text = json.dumps({"temperature": 0, **body} if path.startswith("/v1") else body).replace("TEXT", "hello there")
    server.client.post(path, content=text)  # both requests that count tokens find the prompt's blocks in the cache
    here = server.client.post(path, content=text)
    monkeypatch.setattr(parsing, "INLINE_BYTES", 0)
    there = server.client.post(path, content=text)
    assert (there.status_code, _fixed(there.text)) == (here.status_code, _fixed(here.text))


def _fixed(text: str) -> list[Any]:
    """The documents of an answer without the fields that differ from one answer to the next."""
    lines = text.replace("\0", "\n").splitlines()
    lines = [line.removeprefix("data:").strip() for line in lines if not line.startswith("event:")]
    return [_without(json.loads(line)) if line.startswith(("{", "[{")) else line for line in lines]


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without(item) for name, item in value.items() if name not in VARYING}
    return [_without(item) for item in value] if isinstance(value, list) else value


@contextlib.contextmanager
def waiting(server: FakeServer, text: str) -> Iterator[None]:
    """Within the context a client's body is being parsed or is in the queue; afterwards the client has disconnected."""
    body = json.dumps({"prompt": text}).encode()
    address = httpx.URL(server.url)
    before = server.parsing.num_active
    with socket.create_connection((address.host, address.port)) as sock:
        sock.sendall(b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n")
        sock.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: server.parsing.num_active == before + 1)
        yield
    until(lambda: server.parsing.num_active == before)


def test_others_are_answered_while_a_body_is_parsed_and_it_ends_with_its_client(troubled: FakeServer, tmp_path: Path):
    with waiting(troubled, "wait" + LONG):
        parser = pid_of(tmp_path)
        assert parser != os.getpid()
        assert troubled.post("/tokenize", {"prompt": "small"}).json()["count"] == 3
        assert is_alive(parser)
    until(lambda: not is_alive(parser))
    assert troubled.parsing.num_bytes == 0
    assert troubled.post("/tokenize", {"prompt": LONG}).json()["count"] == 3


def test_a_body_is_read_while_long_ones_that_came_before_it_are(troubled: FakeServer):
    with contextlib.ExitStack() as stack:
        for _ in range(troubled.parsing.num_workers):
            stack.enter_context(waiting(troubled, "wait" + "x" * LONG_BYTES))
        assert troubled.post("/tokenize", {"prompt": LONG}).json()["count"] == 3


def test_a_body_that_waits_is_given_up_with_its_client_too(troubled: FakeServer, tmp_path: Path):
    with contextlib.ExitStack() as stack:
        for _ in range(troubled.parsing.num_workers):
            stack.enter_context(waiting(troubled, "wait" + LONG))
        parser = pid_of(tmp_path)
        with waiting(troubled, LONG):
            pass
        assert is_alive(parser)


def test_a_client_that_goes_before_a_parser_is_there_leaves_none(troubled: FakeServer, tmp_path: Path):
    with waiting(troubled, "wait" + LONG):
        pass
    assert troubled.post("/tokenize", {"prompt": LONG}).json()["count"] == 3
    assert len(troubled.parsing.idle) == 1


@pytest.mark.parametrize("what", ["die", "fill"])
def test_a_body_that_ends_its_parser_is_refused_and_the_next_is_not(troubled: FakeServer, what: str):
    response = troubled.post("/v1/completions", {"prompt": what + LONG})
    assert response.status_code == 413
    assert "more time or memory" in response.text or "more memory" in response.text
    assert troubled.post("/v1/completions", {"prompt": LONG, "max_tokens": 1}).status_code == 200


def test_a_body_that_takes_too_long_is_refused(troubled: FakeServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kinds, "PARSER", replace(kinds.PARSER, silence_s=0.1))
    assert troubled.post("/v1/completions", {"prompt": "wait" + LONG}).status_code == 413


def test_memory_of_a_large_body_is_gone_with_its_process(troubled: FakeServer, tmp_path: Path):
    assert troubled.post("/tokenize", {"prompt": "x" * (2 << 20)}).status_code == 200
    until(lambda: not is_alive(pid_of(tmp_path)))


def test_no_more_bodies_wait_than_memory_is_meant_for(troubled: FakeServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parsing, "_MAX_BYTES", 3 * INLINE_BYTES)
    with waiting(troubled, "wait" + LONG), waiting(troubled, "wait" + LONG):
        for path in ("/v1/completions", "/generate"):
            response = troubled.post(path, {"prompt": 2 * LONG})
            assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert troubled.post("/tokenize", {"prompt": 2 * LONG}).status_code == 200


def test_a_parser_that_dies_and_its_template_are_started_again(troubled: FakeServer, tmp_path: Path):
    assert troubled.post("/tokenize", {"prompt": LONG}).status_code == 200
    template = troubled.parsing._template.pids
    for pid in (pid_of(tmp_path), *template):
        os.kill(pid, 9)
        until(lambda pid=pid: not is_alive(pid))
    assert troubled.post("/tokenize", {"prompt": LONG}).status_code == 413
    assert troubled.post("/tokenize", {"prompt": LONG}).status_code == 200
    assert troubled.parsing._template.pids != template


def test_what_is_left_of_a_body_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parsing, "_MAX_REPLY_BYTES", 1000)
    with fake_server() as server:
        body = {"input": "hi", "max_output_tokens": 1, "metadata": {"a": LONG}}
        assert server.post("/v1/responses", body).status_code == 413


def test_every_endpoint_with_a_body_parses_it_apart(monkeypatch: pytest.MonkeyPatch):
    """So that no route decodes a body on the event loop."""
    made: list[Any] = []

    def recorded(*arguments: Any, **more: Any) -> Any:
        made.extend(make_dialects(*arguments, **more))
        return made

    monkeypatch.setattr("tests.support.servers.make_dialects", recorded)
    with fake_server():
        endpoints = [endpoint for dialect in made for endpoint in dialect.endpoints]
    assert len(endpoints) > 50
    assert [endpoint.path for endpoint in endpoints if endpoint.bodies and endpoint.parse is None] == []
