"""Limits, disconnects, health and stopping: how the server treats clients that come, leave and stay too long."""

import contextlib
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from kvloom.rank.fake import ByteTokenizer
from kvloom.server.secure.api_keys import new_key
from tests.support.servers import MODEL, FakeServer, fake_server
from tests.support.waiting import until

LONG = {"max_tokens": 1500, "ignore_eos": True, "seed": 1}


@pytest.fixture
def slow():
    """A server whose steps take 5 ms, so that requests are still running when the test acts."""
    with fake_server(max_link_num=2, step_s=0.005) as server:
        yield server


def test_a_body_over_the_limit_is_a_413(server: FakeServer):
    response = server.chat("x" * (1 << 20))
    assert response.status_code == 413
    assert "larger than 1048576 bytes" in response.json()["error"]["message"]
    chunks = (b"x" * 65536 for _ in range(32))
    with contextlib.suppress(httpx.WriteError):  # answered and closed before all was sent
        assert server.client.post("/v1/chat/completions", content=chunks).status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nope", 404), ("GET", "/v1/completions", 405), ("GET", "/nope", 404), ("GET", "/generate", 405)],
)
def test_a_wrong_path_or_method_has_an_error_of_its_family(server: FakeServer, method: str, path: str, status: int):
    response = server.client.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert path in (error["message"] if path.startswith("/v1/") else error)


def test_a_bug_costs_its_request_and_not_the_connection(monkeypatch: pytest.MonkeyPatch):
    def broken(*_args: object, **_fields: object) -> list[int]:
        raise TypeError("a bug")

    monkeypatch.setattr(ByteTokenizer, "encode", broken)
    with fake_server() as server:
        for _ in range(20):
            response = server.client.post("/v1/completions", json={"model": MODEL, "prompt": "hi"})
            assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
            assert response.headers["x-request-id"]
            assert server.client.post("/generate", json={"inputs": "hi"}).status_code == 500


def test_a_request_id_comes_back_or_is_made(server: FakeServer):
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
    given = server.client.post("/v1/completions", json=body, headers={"X-Request-Id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    made = server.client.post("/v1/completions", json=body, headers={"X-Request-Id": "bad id"})
    assert len(made.headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/v1/models", {"X-Api-Key": ""}, 401),
        ("GET", "/v1/nope", {}, 404),
        ("GET", "/console/nope", {}, 404),
        ("GET", "/generate", {}, 405),
        ("POST", "/v1/completions", {"Origin": "https://evil.example"}, 403),
        ("POST", "/v1/completions", {"Content-Type": "text/plain"}, 415),
        ("GET", "/v1/models", {"X-Api-Key": "", "Host": "evil.example"}, 421),
    ],
)
def test_a_refusal_has_a_request_id_too(method: str, path: str, headers: dict[str, str], status: int):
    key = new_key()
    with fake_server(keys=[key]) as server:
        for given, wanted in (({"X-Request-Id": "mine-1"}, "mine-1"), ({}, "[0-9a-f]{32}")):
            sent = {"X-Api-Key": key, **headers, **given}
            sent = {name: value for name, value in sent.items() if value}
            response = server.client.request(method, path, headers=sent, content=b"{}" if method == "POST" else None)
            assert response.status_code == status
            assert re.fullmatch(wanted, response.headers["x-request-id"])


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_blocks(slow: FakeServer, stream: bool):
    total = slow.engine.stats().num_blocks

    def ask() -> None:
        body = {"model": MODEL, "prompt": "hi", "stream": stream, **LONG}
        with httpx.Client(base_url=slow.url) as client, client.stream("POST", "/v1/completions", json=body) as response:
            for _ in response.iter_raw():
                return

    if stream:
        ask()
    else:
        slow.leave("/v1/completions", {"model": MODEL, "prompt": "hi", **LONG})
    until(lambda: slow.engine.stats().num_running == 0 and slow.engine.stats().num_free_blocks == total)
    until(lambda: slow.admission.num_active == 0)


def test_more_requests_than_run_and_wait_are_refused_and_the_others_all_answered(slow: FakeServer):
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 40, "ignore_eos": True}
    refused = threading.Event()

    def ask(i: int) -> httpx.Response:
        return httpx.post(slow.url + "/v1/completions", json=body, timeout=120)

    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(ask, i) for i in range(6)]
        until(lambda: slow.admission.num_active == 6)
        assert slow.engine.stats().num_running <= 2
        for stream in (False, True):
            response = slow.post("/v1/completions", {**body, "stream": stream})
            assert response.status_code == 429
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"]["type"] == "rate_limit_error"
        refused.set()
        assert [future.result().status_code for future in running] == [200] * 6


def test_health_is_503_while_draining_and_new_requests_are_refused(slow: FakeServer):
    assert slow.client.get("/health").status_code == 200
    slow.health.is_draining = True
    for response in (slow.client.get("/health"), slow.complete("hi")):
        assert response.status_code == 503
        assert response.headers["retry-after"] == "2"
        assert "the server is stopping" in response.text


def test_an_engine_that_stops_mid_stream_is_an_error_event_then_done(slow: FakeServer):
    body = {"model": MODEL, "prompt": "hi", "stream": True, **LONG}
    with slow.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        threading.Thread(target=slow.engine.close).start()
        rest = [line.removeprefix("data: ") for line in lines if line]
    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["error"]["message"] == "the server is stopping"
    assert slow.complete("hi").status_code == 503


def test_many_bad_requests_leave_nothing_behind(server: FakeServer):
    total = server.engine.stats().num_blocks
    for i in range(200):
        assert server.post("/v1/completions", {"model": MODEL, "prompt": [i], "temperature": 9}).status_code == 400
    assert server.admission.num_active == 0
    until(lambda: server.engine.stats().num_free_blocks == total)
