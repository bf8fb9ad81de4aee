"""Answers that do not end normally: the grammar's parser fails, or the server stops."""

import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support.servers import MODEL, FakeServer, fake_server
from tests.support.waiting import until

# accepted as a grammar; after the first letter the parser exceeds its limit of possibilities
_NUM = 240
AMBIGUOUS = "\n".join(
    [
        f"start: {' | '.join(f'x{i}' for i in range(_NUM))}",
        *(f'x{i}: "a" x{(7 * i + 1) % _NUM} "b"' for i in range(_NUM)),
    ]
)
GAVE_UP = "the answer's grammar cannot be followed any further: "
STOPPING = "the server is stopping"
ASKED = [{"role": "user", "content": "hi"}]
Read = Callable[[Any], str]

# path, body without a grammar, field of the grammar, where the error's text is, whether the route streams
ROUTES: dict[str, tuple[str, dict[str, Any], Callable[[str], dict[str, Any]], Read, dict[str, Any] | None]] = {
    "chat": (
        "/v1/chat/completions", {"model": MODEL, "messages": ASKED}, lambda g: {"guided_grammar": g},
        lambda b: b["error"]["message"], {"stream": True},
    ),
    "completions": (
        "/v1/completions", {"model": MODEL, "prompt": "hi", "max_tokens": 90}, lambda g: {"guided_grammar": g},
        lambda b: b["error"]["message"], {"stream": True},
    ),
    "responses": (
        "/v1/responses", {"model": MODEL, "input": "hi"}, lambda g: {"guided_grammar": g},
        lambda b: (b.get("response") or b)["error"]["message"], {"stream": True},
    ),
    "messages": (
        "/v1/messages", {"model": MODEL, "messages": ASKED, "max_tokens": 90}, lambda g: {"guided_grammar": g},
        lambda b: b["error"]["message"], {"stream": True},
    ),
    "ollama": (
        "/api/chat", {"model": MODEL, "messages": ASKED, "stream": False}, lambda g: {"guided_grammar": g},
        lambda b: b["error"], {"stream": True},
    ),
    "tgi": (
        "/generate", {"inputs": "hi", "parameters": {"max_new_tokens": 90}},
        lambda g: {"parameters": {"max_new_tokens": 90, "guided_grammar": g}}, lambda b: b["error"], None,
    ),
    "tgi stream": (
        "/generate_stream", {"inputs": "hi", "parameters": {"max_new_tokens": 90}},
        lambda g: {"parameters": {"max_new_tokens": 90, "guided_grammar": g}}, lambda b: b["error"], {},
    ),
    "vllm": (
        "/generate", {"prompt": "hi", "max_tokens": 90}, lambda g: {"guided_grammar": g}, lambda b: b["error"], None,
    ),
    "triton": (
        f"/v2/models/{MODEL}/generate", {"text_input": "hi", "parameters": {"max_new_tokens": 90}},
        lambda g: {"parameters": {"max_new_tokens": 90, "guided_grammar": g}}, lambda b: b["error"], None,
    ),
    "native": (
        "/infer", {"inputs": "hi", "parameters": {"max_new_tokens": 90}},
        lambda g: {"parameters": {"max_new_tokens": 90, "guided_grammar": g}}, lambda b: b["error"], {"stream": True},
    ),
}  # fmt: skip
FAILS_WHOLE = {"responses"}  # its answer is a response object with status "failed", sent with HTTP status 200
V1 = {"chat", "completions", "responses", "messages", "ollama"}
CASES = [(name, False) for name in ROUTES if ROUTES[name][4] != {}]
CASES += [(name, True) for name, route in ROUTES.items() if route[4] is not None]


def last_event(text: str) -> Any:
    lines = [line for line in text.replace("\0", "\n").splitlines() if line.startswith(("data: {", "data:{", "{"))]
    return json.loads(lines[-1].removeprefix("data:"))


@pytest.mark.parametrize(("name", "is_streamed"), CASES)
def test_a_grammar_that_the_parser_gives_up_on_is_an_error(server: FakeServer, name: str, is_streamed: bool):
    path, body, constrained, read, streams = ROUTES[name]
    answer = server.post(path, body | constrained(AMBIGUOUS) | ((streams or {}) if is_streamed else {}))
    if is_streamed:
        assert read(last_event(answer.text)).startswith(GAVE_UP)
        return
    assert answer.status_code == (200 if name in FAILS_WHOLE else 500 if name in V1 else 424)
    assert read(answer.json()).startswith(GAVE_UP)
    assert "<state>" not in answer.text


@pytest.mark.parametrize(("name", "is_streamed"), CASES)
def test_a_grammar_that_nothing_matches_is_the_callers_mistake(server: FakeServer, name: str, is_streamed: bool):
    path, body, constrained, _read, streams = ROUTES[name]
    answer = server.post(path, body | constrained("start: start") | ((streams or {}) if is_streamed else {}))
    assert is_streamed or answer.status_code in (400, 422)
    assert GAVE_UP in answer.text


def test_others_go_on_beside_it(server: FakeServer):
    plain = server.complete("hello", max_tokens=30, seed=1, ignore_eos=True).json()["choices"]
    server.complete("hi", guided_grammar=AMBIGUOUS)
    assert server.complete("hello", max_tokens=30, seed=1, ignore_eos=True).json()["choices"] == plain
    assert server.engine.is_ready


@pytest.mark.parametrize(("name", "is_streamed"), CASES)
def test_what_runs_when_the_server_stops_ends_as_unavailable(name: str, is_streamed: bool):
    path, body, _, read, streams = ROUTES[name]
    with fake_server(has_eos=False, step_s=0.02) as server:
        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(server.post(path, body | ((streams or {}) if is_streamed else {})))

        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: server.engine.stats().total_output_tokens >= 2)
        server.engine.close()
        asking.join()
    if is_streamed:
        assert read(last_event(answers[0].text)) == STOPPING
        return
    if name not in FAILS_WHOLE:
        assert answers[0].status_code == (529 if name == "messages" else 503)
        assert answers[0].headers["Retry-After"] == "2"
    assert read(answers[0].json()) == STOPPING
