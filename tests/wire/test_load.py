"""Many streams at once, the first request over the limit, and how soon a slot is free again."""

import asyncio
import json
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import aiohttp
import httpx
import pytest

from kvloom.contract.sampling import SamplingParams
from kvloom.rank.fake import EOS_ID, fake_answer
from kvloom.server.errors import family_of
from tests.support.servers import FakeServer, fake_server
from tests.support.waiting import until
from tests.wire.cases import CASES, MODEL
from tests.wire.gate import Gate

NUM_SERVED, NUM_REFUSED_FROM = 300, 901
NUM_TOKENS = 8
REFUSED = "300 requests are being served and 600 wait; try again later"
V2 = f"/v2/models/{MODEL}"
TOKENS = {"parameters": {"max_new_tokens": NUM_TOKENS}}
LONG = {"parameters": {"max_new_tokens": 60}}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture(autouse=True)
def many_files():
    """Raise the limit of descriptors: this process holds both ends of a thousand connections."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], min(4096, before[1])), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _events(raw: str) -> list[Any]:
    lines = [line.removeprefix("data:").strip() for line in raw.split("\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


# dialect: path, body of a prompt, text of a whole stream
STREAMS: tuple[tuple[str, Callable[[str], dict[str, Any]], Callable[[str], str]], ...] = (
    (
        "/v1/completions",
        lambda prompt: {"prompt": prompt, "model": MODEL, "max_tokens": NUM_TOKENS, "stream": True, "temperature": 0},
        lambda raw: "".join(event["choices"][0]["text"] for event in _events(raw)),
    ),
    (
        "/generate_stream",
        lambda prompt: {"inputs": prompt, **TOKENS},
        lambda raw: _events(raw)[-1]["generated_text"],
    ),
    (
        "/generate",
        lambda prompt: {"prompt": prompt, "max_tokens": NUM_TOKENS, "stream": True, "temperature": 0},
        lambda raw: "".join(json.loads(frame)["text"][0] for frame in raw.split("\0")[:-1]),
    ),
    (
        f"{V2}/generate_stream",
        lambda prompt: {"text_input": prompt, **TOKENS},
        lambda raw: "".join(event["text_output"] for event in _events(raw)),
    ),
    (
        "/infer",
        lambda prompt: {"inputs": prompt, "stream": True, **TOKENS},
        lambda raw: _events(raw)[-1]["generated_text"],
    ),
)


def expected(prompt: str) -> str:
    ids = fake_answer(list(prompt.encode()), SamplingParams(temperature=0), 0, NUM_TOKENS)
    return bytes(ids[: ids.index(EOS_ID)] if EOS_ID in ids else ids).decode()


async def _stream(session: aiohttp.ClientSession, number: int) -> None:
    path, body, text_of = STREAMS[number % len(STREAMS)]
    prompt = f"stream {number}"
    async with session.post(path, json=body(prompt)) as response:
        raw = await response.text()
    assert response.status == 200, raw
    assert text_of(raw) == expected(prompt)


async def _run(server: FakeServer, count: int, when_all_there: Callable[[], None]) -> None:
    timeout = aiohttp.ClientTimeout(60)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.url, timeout=timeout, connector=connector) as session:
        tasks = [asyncio.create_task(_stream(session, number)) for number in range(count)]
        while server.admission.num_active < count:
            await asyncio.sleep(0.01)
            assert not any(task.done() for task in tasks)
        await asyncio.to_thread(when_all_there)
        await asyncio.gather(*tasks)


def test_300_streams_at_once_are_all_answered_rightly(gate: Gate):
    with fake_server(names=(MODEL,), max_link_num=NUM_SERVED) as server:
        total = server.engine.stats().num_blocks
        asyncio.run(_run(server, NUM_SERVED, gate.open))
        until(lambda: server.admission.num_active == 0 and server.engine.stats().num_free_blocks == total)


def test_request_901_is_refused_in_its_dialect_and_the_900_are_answered(gate: Gate):
    generating = [case for case in CASES if case.method == "POST" and "error" not in case.name]
    beside = ("stopInfer", "tokenizer", "tokenize", "count_tokens", "show", "pull", "push", "create", "copy")
    beside += ("ping", "render", "flush_cache", "index", "wake_up", "input_tokens", "compact")
    beside += ("load_model", "reset_prefix_cache?reset_running_requests=true")
    generating = [case for case in generating if not case.path.endswith(beside) and "/blobs/" not in case.path]
    generating = [case for case in generating if case.name != "ollama-chat-load"]  # generates no answer
    with fake_server(names=(MODEL,), max_link_num=NUM_SERVED) as server:

        def refused() -> None:
            assert server.admission.num_active == NUM_REFUSED_FROM - 1
            for case in generating:
                response = server.post(case.path, case.body)
                status = 529 if case.path.startswith("/v1/messages") else 429
                assert (response.status_code, response.headers.get("retry-after")) == (status, "1"), case.name
                if case.path.startswith("/v1/messages"):
                    kind = {"type": "overloaded_error"}
                    assert response.json() == {"type": "error", "error": {"message": REFUSED, **kind}}
                elif family_of(case.path) == "openai":
                    kind = {"type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded"}
                    assert response.json() == {"error": {"message": REFUSED, **kind}}
                elif case.path.startswith("/api/"):
                    assert response.json() == {"error": REFUSED}
                else:
                    assert response.json() == {"error": REFUSED, "error_type": "overloaded"}
            assert server.client.get("/v2/health/ready").status_code == 503
            assert server.client.get("/v2/health/live").status_code == 200
            gate.open()

        asyncio.run(_run(server, NUM_REFUSED_FROM - 1, refused))
        until(lambda: server.client.get("/v2/health/ready").status_code == 200)


def _taken(server: FakeServer) -> int:
    slots = server.client.get(f"{V2}/getSlotCount").json()
    return slots["total_slots"] - slots["free_slots"]


@contextmanager
def _two_running(server: FakeServer, gate: Gate, path: str) -> Iterator[httpx.Response]:
    """Start a request that stays and a second one; both are in the waiting step. The open stream of the second."""
    body = {"text_input": "hi", "prompt": "hi", "model": MODEL, "stream": True, "max_tokens": 30}
    body |= {"parameters": {"max_new_tokens": 30}, "id": "leaves"}
    if path == "/generate":
        body = {"prompt": "hi", "stream": True, "max_tokens": 30}
    with ThreadPoolExecutor(2) as pool, httpx.Client(base_url=server.url, timeout=120) as client:
        try:
            stays = pool.submit(httpx.post, server.url + "/generate", json={"inputs": "stay", **LONG}, timeout=120)
            until(lambda: gate.is_waited_at)
            opened = pool.submit(client.send, client.build_request("POST", path, json=body), stream=True)
            until(lambda: opened.done() or bool(gate.is_waited_at and gate.let()))
            with closing(opened.result()) as leaves:
                until(lambda: gate.is_waited_at)
                assert gate.sizes[-1] == _taken(server) == 2
                yield leaves
        finally:
            gate.open()
        assert stays.result().status_code == 200


@pytest.mark.parametrize("path", [f"{V2}/generate_stream", "/v1/completions", "/generate"])
def test_a_disconnect_frees_the_slot_within_one_step(gate: Gate, path: str):
    with fake_server(names=(MODEL,), has_eos=False) as server, _two_running(server, gate, path) as leaves:
        leaves.close()
        until(lambda: server.admission.num_active == 1)
        _is_free_within_one_step(server, gate)


def test_stop_infer_frees_the_slot_within_one_step(gate: Gate):
    path = f"{V2}/generate_stream"
    with fake_server(names=(MODEL,), has_eos=False) as server, _two_running(server, gate, path) as leaves:
        stopped = server.post(f"{V2}/stopInfer", {"id": "leaves"})
        assert (stopped.status_code, stopped.json()) == (200, {"id": "leaves"})
        _is_free_within_one_step(server, gate)
        last = leaves.read().decode().strip().rpartition("data:")[2]
        assert json.loads(last)["text_output"] == ""
    assert server.admission.num_active == 0


def _is_free_within_one_step(server: FakeServer, gate: Gate) -> None:
    """The running step still has both requests; the next one begins without the one that left, as its count shows."""
    num_steps = len(gate.sizes)
    gate.let(2)
    until(lambda: _taken(server) == 1)
    assert gate.sizes[num_steps] == 1
