"""/v1/images/generations of a real server with a tiny pipeline beside the mock language model."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvloom.server.dialects.openai.images import Images
from kvloom.server.http.reply import HttpRequest
from kvloom.server.serving.pictures.card import PictureCard
from kvloom.server.serving.pictures.service import PictureService
from tests.images.test_process import FakePainter
from tests.support.lazily import lazily
from tests.support.processes import ServeProcess, serve
from tests.support.waiting import WAIT_S, until

pytestmark = pytest.mark.skipif(find_spec("diffusers") is None, reason="needs diffusers: pip install 'kvloom[images]'")
pictures = pytest.importorskip("PIL.Image")
openai = lazily("openai")
LONG = {"prompt": "a cat", "num_inference_steps": 200, "n": 10}


@pytest.fixture(scope="module")
def running(tiny_pipeline: Path) -> Iterator[ServeProcess]:
    arguments = ("--backend", "fake", "--served-model-name", "mock", "--image-model", f"sd={tiny_pipeline}")
    with serve(*arguments) as process:
        yield process


@pytest.fixture(scope="module")
def http(running: ServeProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=WAIT_S) as client:
        yield client


@pytest.fixture(scope="module")
def client(running: ServeProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client:
        yield client


def paint(http: httpx.Client, **fields: object) -> httpx.Response:
    return http.post("/v1/images/generations", json={"prompt": "a cat", "num_inference_steps": 3, **fields})


def picture(b64: str) -> Any:
    return pictures.open(io.BytesIO(base64.b64decode(b64)))


def figure(http: httpx.Client, name: str) -> float:
    """A value of /metrics."""
    line = next(line for line in http.get("/metrics").text.splitlines() if line.startswith(f"{name}{{"))
    return float(line.rpartition(" ")[2])


def test_the_openai_client(client: openai.OpenAI):
    answer = client.images.generate(
        model="sd", prompt="a cat", n=2, size="64x48", extra_body={"num_inference_steps": 2}
    )
    assert answer.data is not None
    assert [picture(item.b64_json or "").size for item in answer.data] == [(64, 48)] * 2
    assert (answer.size, answer.quality, answer.background, answer.output_format) == (
        "64x48",
        "medium",
        "opaque",
        "png",
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens_details.text_tokens == 6


def test_the_openai_client_streams_partial_pictures(client: openai.OpenAI):
    more = {"num_inference_steps": 4, "seed": 5}
    stream = client.images.generate(
        model="sd", prompt="a cat", stream=True, partial_images=2, output_format="webp", extra_body=more
    )
    events = list(stream)
    assert [event.type for event in events] == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    assert [event.partial_image_index for event in events[:2]] == [0, 1]
    assert all(picture(event.b64_json).format == "WEBP" for event in events)
    assert events[-1].usage.input_tokens == 6
    whole = client.images.generate(model="sd", prompt="a cat", output_format="webp", extra_body=more)
    assert whole.data is not None
    assert whole.data[0].b64_json == events[-1].b64_json


def test_a_seed_makes_a_picture_again(http: httpx.Client):
    first, second = paint(http, n=2, seed=41).json()["data"]
    assert (first["seed"], second["seed"]) == (41, 42)
    assert paint(http, seed=42).json()["data"] == [second]
    drawn = paint(http).json()["data"][0]
    assert paint(http, seed=drawn["seed"]).json()["data"] == [drawn]


def test_a_stream_of_several_pictures_tells_how_far_it_is(http: httpx.Client):
    text = paint(http, n=2, stream=True).text
    assert [line for line in text.split("\n") if line.startswith(":")] == [f": step {i} of 3" for i in (1, 2, 3)] * 2
    events = [json.loads(line[5:]) for line in text.split("\n") if line.startswith("data: {")]
    assert [(event["type"], event["index"]) for event in events] == [("image_generation.completed", i) for i in (0, 1)]
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"prompt": ""}, "prompt: expected `str` of length >= 1"),
        ({"prompt": "x" * 32001}, "prompt: expected `str` of length <= 32000"),
        ({"prompt": "x " * 200}, "prompt: has 202 tokens; this model reads 77"),
        ({"n": 11}, "n: expected `int` <= 10"),
        ({"n": 0}, "n: expected `int` >= 1"),
        ({"size": "64"}, "size: must be WIDTHxHEIGHT in pixels, as 1024x768, or auto, got '64'"),
        ({"size": "-64x64"}, "size: must be WIDTHxHEIGHT in pixels, as 1024x768, or auto, got '-64x64'"),
        ({"size": "60x64"}, "size: must be multiples of 8, got 60x64"),
        ({"size": "2048x2056"}, "size: 1 of 2048x2056 are more than the 4194304 pixels that a request may have"),
        ({"n": 5, "size": "960x1024"}, "size: 5 of 960x1024 are more than the 4194304 pixels that a request may have"),
        ({"seed": -1}, "seed: expected `int` >= 0"),
        ({"num_inference_steps": 201}, "num_inference_steps: expected `int` <= 200"),
        ({"response_format": "url"}, "response_format: must be b64_json: pictures are not kept, got 'url'"),
        ({"output_format": "gif"}, "output_format: must be png, jpeg or webp, got 'gif'"),
        ({"output_compression": 50}, "output_compression: must be 100 for png; jpeg and webp have others"),
        ({"background": "transparent"}, "background: must be auto or opaque, got 'transparent'"),
        ({"partial_images": 1}, "partial_images: needs stream: true"),
        ({"partial_images": 4, "stream": True}, "partial_images: expected `int` <= 3"),
        ({"style": "vivid"}, "style: is not supported"),
        ({"svg": {"model": "x"}}, "svg: is not supported"),
        ({"image": "x"}, "image: is not supported"),
        ({"model": "mock"}, "model: 'mock' is a language model; of those that make pictures this server has 'sd'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_streamed", [False, True])
def test_bad_requests_name_the_field(http: httpx.Client, fields: dict[str, object], sentence: str, is_streamed: bool):
    answer = paint(http, **({"stream": True} if is_streamed and "partial_images" not in fields else {}), **fields)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, sentence)
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"quality": "low"}, {"quality": "low", "steps": 2}),
        ({"quality": "standard"}, {"quality": "medium", "steps": 3}),
        ({"quality": "hd"}, {"quality": "high", "steps": 4}),
        ({"quality": "max"}, {"quality": "max", "steps": 9}),
        ({"quality": "max", "num_inference_steps": 1}, {"quality": "max", "steps": 1}),
    ],
)
def test_quality_is_the_number_of_steps(fields: dict[str, object], told: dict[str, object]):
    """Without a server: the steps that follow from a request's body for a model whose own number of steps is 3."""

    asked = Images(None).parse(HttpRequest(json.dumps({"prompt": "x", **fields}).encode()))
    order = PictureService(PictureCard("sd", "", steps=3), FakePainter()).order(asked.wanted)
    assert {"quality": asked.quality, "steps": order.steps} == told


def test_models_and_the_other_routes_know_of_it(http: httpx.Client):
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert set(cards) == {"mock", "sd"}
    assert cards["sd"]["task"] == "text-to-image"
    assert http.get("/v1/models/sd").json() == cards["sd"]
    chat = http.post("/v1/chat/completions", json={"model": "sd", "messages": [{"role": "user", "content": "hi"}]})
    large = http.post(
        "/v1/chat/completions", json={"model": "sd", "messages": [{"role": "user", "content": "x" * 9000}]}
    )
    for answer in (chat, large):
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == "'sd' makes pictures: POST /v1/images/generations"
    assert http.get("/v2/models/sd").status_code == 404
    assert paint(http, model="gpt-image-2").status_code == 200  # any name means the first model, as on other routes
    assert http.post("/images/generations", json={"prompt": "x", "num_inference_steps": 1}).status_code == 200


def test_a_client_that_leaves_ends_its_picture(http: httpx.Client):
    before = figure(http, "image_requests_aborted_total")
    with http.stream("POST", "/v1/images/generations", json={**LONG, "stream": True}) as answer:
        next(answer.iter_raw())
    until(lambda: figure(http, "image_requests_aborted_total") == before + 1)
    assert figure(http, "num_image_requests_running") == 0
    assert paint(http).status_code == 200
    assert figure(http, "image_steps_total") < 2000


def test_a_full_queue_is_a_429(running: ServeProcess, http: httpx.Client):
    host, port = running.url.removeprefix("http://").split(":")
    body = json.dumps(LONG).encode()
    head = f"POST /v1/images/generations HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    clients = []
    try:
        for _ in range(9):
            clients.append(socket.create_connection((host, int(port))))
            clients[-1].sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: figure(http, "num_image_requests_waiting") == 8)
        answer = paint(http)
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
        assert answer.json()["error"]["type"] == "rate_limit_error"
        rows = http.get("/console/feed").json()["requests"]
        assert len(rows) == 9
        assert sum(row["state"] == "queued" for row in rows) == 8
        assert http.delete(f"/console/requests/{rows[0]['id']}").status_code == 200
    finally:
        for each in clients:
            each.close()
    until(lambda: figure(http, "num_image_requests_waiting") + figure(http, "num_image_requests_running") == 0)


def test_all_its_threads_give_way_to_other_processes(running: ServeProcess, http: httpx.Client):
    assert paint(http).status_code == 200
    threads = [int(thread) for thread in os.listdir(f"/proc/{painter_pid(running)}/task")]
    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {5}


def test_a_killed_process_is_told_and_started_again(running: ServeProcess, http: httpx.Client):
    pid = painter_pid(running)
    with http.stream("POST", "/v1/images/generations", json={**LONG, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(pid, signal.SIGKILL)
        last = [line for line in lines if line.startswith("data:")][-1]
    error = json.loads(last[5:])["error"]
    assert error["message"] == "the model process was killed by signal 9"
    refused = paint(http)
    if refused.status_code != 200:  # unless the process has already restarted
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "2")
    until(lambda: http.get("/readyz").status_code == 200)
    assert paint(http).status_code == 200
    assert painter_pid(running) != pid
    assert figure(http, "image_model_restarts_total") == 1


def painter_pid(running: ServeProcess) -> int:
    """The id of the pipeline's process, a child of the server."""
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes()
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if b"kvloom.images.main" in command and parent == running.process.pid:
            return int(entry.name)
    raise AssertionError("there is no such process")
