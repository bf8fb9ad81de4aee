"""A vision model on vLLM itself: the tokens of vLLM's own server, different images, files that are no images.

KVLOOM_VLLM_PYTHON names an interpreter with vLLM, as for test_vllm_engine.py.
"""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.compat.test_vllm_engine import kvloom, vllm_alone
from tests.support.images import data_url, huge_png, png
from tests.support.models.seeing_weights import make_seeing_model
from tests.support.processes import ServeProcess

pytestmark = [pytest.mark.compat, pytest.mark.timeout(900)]
WAIT_S = 120.0
RED, WIDE = png("red", (60, 60)), png("blue", (200, 90))


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


CHATS = {
    "one": [{"role": "user", "content": [image(RED), text("What?")]}],
    "another": [{"role": "user", "content": [image(png("blue", (60, 60))), text("What?")]}],
    "text-first": [{"role": "user", "content": [text("What is "), image(RED), text("?")]}],
    "several": [{"role": "user", "content": [image(RED), text("and"), image(WIDE), text("?")]}],
    "messages": [
        {"role": "user", "content": [image(WIDE), text("this?")]},
        {"role": "assistant", "content": "blue"},
        {"role": "user", "content": [text("and this?"), image(RED)]},
    ],
    "none": [{"role": "user", "content": "Hello"}],
}
MADE = {"max_tokens": 32, "temperature": 0, "logprobs": True, "return_token_ids": True, "ignore_eos": True}


def ask(url: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/chat/completions", json={"model": "m", **body}, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def told(url: str) -> dict[str, Any]:
    """For each chat: the answer's tokens, the log-probability of the first one, the number of prompt tokens."""
    found = {}
    for name, messages in CHATS.items():
        answer = ask(url, messages=messages, **MADE)
        (choice,) = answer["choices"]
        logprob = round(choice["logprobs"]["content"][0]["logprob"], 2)
        found[name] = choice["token_ids"], logprob, answer["usage"]["prompt_tokens"]
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_seeing_model(tmp_path_factory.mktemp("seeing") / "m")


@pytest.fixture(scope="module")
def server(model, tmp_path_factory) -> Iterator[ServeProcess]:
    with kvloom(tmp_path_factory.mktemp("vision"), model, "m") as running:
        yield running


@pytest.fixture(scope="module")
def ours(server) -> dict[str, Any]:
    """The results of kvloom's server before any of the prompts is cached."""
    return told(server.url)


def test_images_are_seen_and_count(ours):
    assert ours["one"] != ours["another"]
    assert ours["one"][2] == ours["another"][2] > ours["none"][2]


def test_tokens_are_those_of_vllms_own_server(ours, model):
    with vllm_alone(model) as url:
        assert told(url) == ours


@pytest.mark.parametrize(
    ("data", "problem"),
    [(RED[:60], "damaged"), (huge_png(), "pixels"), (png(kind="GIF"), "is declared as image/png, but is image/gif")],
    ids=["cut", "huge", "another"],
)
def test_what_is_no_image_is_a_400_that_names_it(server, data, problem):
    body = {"model": "m", "messages": [{"role": "user", "content": [image(data)]}]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=WAIT_S)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "messages[0].content[0].image_url.url"
    assert problem in answer.json()["error"]["message"]


def test_cached_prefixes_are_those_of_the_same_images_alone(server):
    def cached(colour: str) -> int:
        many = [image(png(colour, (112, 112)))] * 10
        answer = ask(server.url, messages=[{"role": "user", "content": many}], max_tokens=2, temperature=0)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached("green"), cached("green") > 0, cached("yellow")] == [0, True, 0]


def test_prompt_logprobs_are_told_of_image_tokens_too(server):
    answer = ask(server.url, messages=CHATS["several"], prompt_logprobs=0, max_tokens=2, temperature=0)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


def test_images_of_decisions_are_tokens_of_the_prompt(server):
    questions = [
        {"type": "choice", "instructions": "Which?", "choices": [{"value": "red"}, {"value": "dark blue"}]},
        {"type": "predicate", "instructions": "Is it small?"},
    ]

    def decided(*images: str) -> tuple[list[float], int]:
        shown = [{"type": "input_image", "image_url": url} for url in images]
        content = [*shown, {"type": "input_text", "text": "A square."}]
        body = {"model": "m", "input": [{"role": "user", "content": content}], "questions": questions}
        answer = httpx.post(f"{server.url}/v1/decisions", json=body, timeout=WAIT_S)
        assert answer.status_code == 200, answer.text
        first, second = answer.json()["answers"]
        odds = [*(each["probability"] for each in first["probabilities"]), second["probability"]]
        return odds, answer.json()["usage"]["input_tokens"]

    red, blue = (data_url(png(colour, (60, 60))) for colour in ("red", "blue"))
    (odds, count), (again, _), (_, same_count), (_, fewer) = decided(red), decided(red), decided(blue), decided()
    assert odds[0] + odds[1] == pytest.approx(1)
    assert again == pytest.approx(odds, rel=0.02)  # bfloat16, in other company
    assert count == same_count > fewer


def test_an_answer_to_a_picture_goes_on_where_vllm_was_killed(server):
    body = {"messages": CHATS["several"], "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    expected = ask(server.url, **body)["choices"][0]["message"]["content"]
    said, pid = "", server.rank_pid()
    asked = {"model": "m", "stream": True, **body}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=asked, timeout=WAIT_S) as answer:
        for event in (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")):
            (choice,) = json.loads(event)["choices"]
            if not said and choice["delta"].get("content"):
                os.kill(pid, signal.SIGKILL)
            said += choice["delta"].get("content") or ""
    assert said == expected
    assert server.rank_pid() != pid
