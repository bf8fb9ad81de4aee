"""Prompts that are too long are refused with the messages that clients look for, and not tokenized if they cannot
fit.
"""

import re
from typing import Any

import pytest

from kvloom.contract.errors import BadRequest
from kvloom.server.serving import prompts
from kvloom.server.serving.generation import MAX_CHOICES
from kvloom.server.serving.options import WireOptions
from tests.support.parsers import StrictTokenizer
from tests.support.servers import FakeServer, fake_server

CONTEXT = 100
BIG = 4 << 20


@pytest.fixture(scope="module")
def strict():
    """A context of 100 tokens of up to eight bytes; tokenizing a text that cannot fit is an error 500 here."""
    options = WireOptions(max_input_chars=BIG)
    with fake_server(tokenizer=StrictTokenizer(), max_seq_len=CONTEXT, max_body_bytes=BIG, options=options) as running:
        yield running


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 3}


OPENAI = [
    ("/v1/chat/completions", chat, "messages"),
    ("/v1/completions", lambda text: {"prompt": text}, "prompt"),
    ("/v1/completions", lambda text: {"prompt": ["a", text], "stream": True}, "prompt"),
    ("/v1/responses", lambda text: {"input": text}, "input"),
    ("/v1/embeddings", lambda text: {"input": ["a", text]}, "input"),
]


@pytest.mark.parametrize("size", [1000, 100_000, 2_000_000])
@pytest.mark.parametrize(("path", "body", "param"), OPENAI)
def test_openai_names_the_context_and_a_code(strict: FakeServer, path: str, body: Any, param: str, size: int):
    response = strict.post(path, body("x" * size))
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["type"], error["param"]) == ("context_length_exceeded", "invalid_request_error", param)
    found = re.match(
        rf"This model's maximum context length is {CONTEXT} tokens\. However, your {param} resulted in "
        rf"(at least )?(\d+) tokens\. Please reduce the length of the {param}\.$",
        error["message"],
    )
    assert found is not None
    assert int(found[2]) >= size // 8
    assert bool(found[1]) == (size // 8 > 99)


def test_ids_are_counted_as_texts_are(strict: FakeServer):
    for prompt in ([1] * 101, [[1], [1] * 101]):
        error = strict.post("/v1/completions", {"prompt": prompt}).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "resulted in 101 tokens" in error["message"]


@pytest.mark.parametrize("size", [1000, 2_000_000])
def test_anthropic_says_prompt_is_too_long(strict: FakeServer, size: int):
    response = strict.post("/v1/messages", chat("x" * size))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert re.match(r"prompt is too long: (at least )?\d+ tokens > 99 maximum$", error["message"])


TGI = [
    ("/", "inputs", {}),
    ("/generate", "inputs", {}),
    ("/generate_stream", "inputs", {}),
    ("/infer", "inputs", {}),
    ("/v2/models/mock/generate", "text_input", {}),
]


@pytest.mark.parametrize("size", [1000, 2_000_000])
@pytest.mark.parametrize(("path", "name", "more"), TGI)
def test_tgi_says_how_both_numbers_exceed_the_context(
    strict: FakeServer, path: str, name: str, more: dict[str, Any], size: int
):
    body = {name: "x" * size, "parameters": {"max_new_tokens": 5}, **more}
    response = strict.post(path, body)
    assert response.status_code == 422
    document = response.json()
    assert document["error_type"] == "validation"
    assert re.match(
        rf"Input validation error: `{name}` tokens \+ `max_new_tokens` must be <= {CONTEXT}\. "
        rf"Given: (at least )?\d+ `{name}` tokens and 5 `max_new_tokens`$",
        document["error"],
    )


def test_what_is_cut_to_fit_is_not_refused():
    with fake_server(max_seq_len=CONTEXT) as server:
        body = {"inputs": "x" * 1000, "parameters": {"truncate": 10, "max_new_tokens": 3}}
        assert server.post("/generate", body).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x" * 1000}),
        ("/tokenize", chat("x" * 1000)),
        ("/v1/messages/count_tokens", chat("x" * 1000)),
        ("/v1/tokenizer", {"inputs": "x" * 1000}),
    ],
)
def test_counting_goes_beyond_the_context(
    strict: FakeServer, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    assert strict.post(path, body).status_code == 200
    monkeypatch.setattr(prompts, "MAX_REQUEST_TOKENS", 100)
    assert strict.post(path, body).status_code in (400, 422)


def test_prompts_of_one_request_are_bounded_together(strict: FakeServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompts, "MAX_REQUEST_TOKENS", 100)
    for path, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        response = strict.post(path, {field: [[1] * 50] * 3})
        assert response.status_code == 400
        assert "has more than 100 tokens in all its prompts" in response.json()["error"]["message"]
        assert strict.post(path, {field: [[1] * 50] * 2, **({"max_tokens": 1} if field == "prompt" else {})}).is_success


def test_too_many_prompts_are_refused_before_any_is_tokenised(strict: FakeServer):
    error = strict.post("/v1/completions", {"prompt": ["x" * 2000] * (MAX_CHOICES + 1)}).json()["error"]
    assert error["message"] == f"prompt: asks for more than {MAX_CHOICES} answers in one request"


def test_the_limit_of_prompts_is_told_where_it_is_not_the_context():
    with fake_server(max_seq_len=CONTEXT, max_iter_times=20) as server:
        error = server.complete("x" * 90, max_tokens=1).json()["error"]
    assert (
        "is 100 tokens, of which prompts have at most 80. However, your prompt resulted in at least 90"
        in error["message"]
    )


def test_a_prompt_that_is_too_long_is_a_bad_request():
    assert issubclass(prompts.PromptTooLong, BadRequest)
