"""Answers of models with every kind of tokenizer: forms, stop strings, streams, echoes, offsets and limits."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema_rs import validate

from kvloom.contract.sampling import SamplingParams
from kvloom.engine.text.tokenizer import Tokenizer
from kvloom.rank.grammar.guides import Guides
from tests.support.models.vocabularies import KINDS, vocabulary
from tests.support.servers import FakeServer, fake_server

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["yes", "no"]}},
    "required": ["a"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "abc", "parameters": SCHEMA}}
PROMPT = "yes no ab x"
LENGTH = 40  # tokens of an answer
CONTEXT = 1024
UNSPELT = "no token of the model spells what must come next"


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(kind: str) -> Iterator[FakeServer]:
    with fake_server(tokenizer=vocabulary(kind), max_seq_len=CONTEXT) as running:
        yield running


@pytest.fixture
def tokenizer(kind: str) -> Tokenizer:
    return vocabulary(kind)


def completion(server: FakeServer, prompt: object = PROMPT, **fields: object) -> dict[str, Any]:
    response = server.complete(prompt, **{"max_tokens": LENGTH, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["choices"][0]
    return found


def streamed(server: FakeServer, **fields: object) -> list[dict[str, Any]]:
    """The choices of a completion's events."""
    response = server.complete(PROMPT, stream=True, **{"max_tokens": LENGTH, "temperature": 0, **fields})
    lines = (line.removeprefix("data: ") for line in response.text.splitlines())
    return [json.loads(line)["choices"][0] for line in lines if line.startswith("{")]


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_is_of_its_schema(server: FakeServer, seed: int):
    response = server.chat("yes", response_format=FORM, seed=seed, temperature=1, max_tokens=400)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    validate(SCHEMA, json.loads(choice["message"]["content"]))


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_choice": ["abc", "xyz"]}, "abc|xyz"),
        ({"guided_choice": [" yes", " no"]}, " yes| no"),
        ({"guided_choice": ["<end>x", "<turn>y"]}, "<end>x|<turn>y"),
        ({"guided_choice": ["ab<end>x"]}, "ab<end>x"),
        ({"guided_regex": "yes( no){2}"}, "yes no no"),
        ({"structured_outputs": {"grammar": 'start: "true" " "? "{"'}}, r"true ?\{"),
    ],
)
def test_an_answer_is_of_its_grammar(server: FakeServer, fields: dict[str, object], pattern: str):
    choice = completion(server, **fields)
    assert (bool(re.fullmatch(pattern, choice["text"])), choice["finish_reason"]) == (True, "stop"), choice["text"]


def test_a_form_that_no_token_spells_ends_with_that_reason(server: FakeServer, kind: str):
    response = server.complete(PROMPT, guided_choice=["ab\x01c"], max_tokens=LENGTH)
    if kind in ("byte-level without control bytes", "WordPiece"):
        assert response.status_code == 500
        assert UNSPELT in response.json()["error"]["message"]
    else:
        assert response.json()["choices"][0]["text"] == "ab\x01c"


def test_a_form_of_a_model_without_an_end_ends_with_that_reason():
    with fake_server(tokenizer=vocabulary("Gemma", has_end=False), max_seq_len=CONTEXT) as server:
        response = server.complete(PROMPT, guided_choice=["abc"], max_tokens=LENGTH)
    assert response.status_code == 500
    assert "the model has no token that ends an answer" in response.json()["error"]["message"]


def test_a_tool_that_must_be_called_is_called(server: FakeServer, kind: str):
    response = server.chat("yes", tools=[TOOL], tool_choice="required", max_tokens=400)
    if kind == "WordPiece":  # has no newline, with which a call begins
        assert UNSPELT in response.json()["error"]["message"]
        return
    assert response.status_code == 200, response.text
    for call in response.json()["choices"][0]["message"]["tool_calls"]:
        assert call["function"]["name"] == "abc"
        validate(SCHEMA, json.loads(call["function"]["arguments"]))


def test_a_stream_is_the_whole_and_both_are_the_text_of_the_tokens(server: FakeServer, tokenizer: Tokenizer):
    whole = completion(server, return_token_ids=True, skip_special_tokens=False)
    events = streamed(server, skip_special_tokens=False)
    assert "".join(event["text"] for event in events) == whole["text"]
    told = b"".join(map(tokenizer.token_bytes, whole["token_ids"])).decode("utf-8", errors="replace")
    assert whole["text"] in (told, told.removesuffix("\ufffd")), "half a character at the end is not shown"
    assert len(whole["token_ids"]) == LENGTH


@pytest.mark.parametrize("at", [0, 5, 17])
def test_a_stop_string_ends_the_answer_before_it(server: FakeServer, at: int):
    text = completion(server)["text"]
    stop = text[at : at + 4]
    wanted = text[: text.index(stop)]
    choice = completion(server, stop=[stop])
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (wanted, "stop", stop)
    events = streamed(server, stop=[stop])
    assert ("".join(event["text"] for event in events), events[-1]["finish_reason"]) == (wanted, "stop")
    included = completion(server, stop=[stop], include_stop_str_in_output=True)
    assert included["text"] == wanted + stop


def test_an_echo_is_the_prompt_and_offsets_count_its_characters(server: FakeServer, kind: str):
    fields = {"echo": True, "logprobs": 0, "max_tokens": 9, "skip_special_tokens": False}
    whole, alone = completion(server, **fields), completion(server, max_tokens=9, skip_special_tokens=False)
    assert whole["text"] == PROMPT + alone["text"]
    found = whole["logprobs"]
    for offset, token in zip(found["text_offset"], found["tokens"], strict=True):
        is_around = token.strip() in ("<s>", "<end>")
        text = token if offset else token.removeprefix(" ")  # with which the tokenizer begins each text
        assert is_around or "\ufffd" in token or whole["text"].startswith((text, "\ufffd"), offset)
    assert found["text_offset"][-9] == len(PROMPT)
    events = streamed(server, **fields)
    assert "".join(event["text"] for event in events) == whole["text"]
    assert [offset for event in events for offset in event["logprobs"]["text_offset"]] == found["text_offset"]
    assert found["tokens"][0] == {"byte-level": "yes", "WordPiece": " <s>"}.get(kind.partition(" ")[0], "<s>")


def test_tokens_become_the_text_again(server: FakeServer, tokenizer: Tokenizer):
    ids = server.post("/tokenize", {"prompt": PROMPT, "add_special_tokens": False}).json()["tokens"]
    assert ids == tokenizer.encode(PROMPT, add_special_tokens=False)
    assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": PROMPT}


@pytest.mark.parametrize("text", ["yes", "    ", " é€", "x\x01y", "ab" * 40])
def test_no_prompt_is_shorter_than_its_length_says(tokenizer: Tokenizer, text: str):
    assert tokenizer.least_tokens(text * 50) <= len(tokenizer.encode(text * 50, add_special_tokens=False))


def test_a_prompt_fills_the_context_to_its_last_token(server: FakeServer, tokenizer: Tokenizer):
    fixed, each = (len(tokenizer.encode(PROMPT + more)) for more in ("", " yes"))
    text = PROMPT + " yes" * ((CONTEXT - 2 - fixed) // (each - fixed))
    num_prompt = len(tokenizer.encode(text))
    response = server.complete(text, max_tokens=CONTEXT - num_prompt, temperature=0)
    assert response.json()["usage"]["prompt_tokens"] == num_prompt
    refused = server.complete(text + " yes" * 8, max_tokens=8, temperature=0)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("mark", ["</think>", "<end>", "x no"])
@pytest.mark.parametrize("name", [name for name in KINDS if name != "WordPiece"])
def test_the_end_of_reasoning_is_forced_as_it_is_spelt(name: str, mark: str):
    tokenizer = vocabulary(name)
    guides = Guides(lambda: tokenizer, tokenizer.vocab_size, must_wait=True)
    guide = guides.guide(SamplingParams(reasoning_end=mark, max_reasoning_tokens=0))
    assert guide is not None
    written = b""
    while (mask := guide.mask()) is not None:
        (forced,) = mask.nonzero()[0]
        guide.take(int(forced))
        written += tokenizer.token_bytes(int(forced))
    assert written.decode() == mark
