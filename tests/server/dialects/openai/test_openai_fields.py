"""Fields of OpenAI's and vLLM's requests: each one has its effect, or is refused by name."""

import json
from typing import Any

import msgspec
import pytest

from kvloom.rank.fake import ByteTokenizer
from kvloom.server.dialects.openai.bodies import ChatBody
from kvloom.server.dialects.openai.messages import Message, conversation_of
from tests.support.servers import FakeServer, fake_server


@pytest.mark.parametrize(
    ("field", "value", "neutral"),
    [
        ("use_beam_search", True, False),
        ("length_penalty", 0.8, 1.0),
        ("bad_words", ["a"], []),
        ("allowed_token_ids", [1], []),
        ("logits_processors", ["x"], []),
        ("spaces_between_special_tokens", False, True),
        ("truncate_prompt_tokens", 5, None),
        ("return_tokens_as_token_ids", True, False),
        ("prompt_embeds", "AAAA", None),
        ("chat_template", "{{ x }}", None),
        ("documents", [{"text": "a"}], []),
        ("modalities", ["audio"], ["text"]),
        ("audio", {"voice": "a"}, None),
        ("web_search_options", {}, None),
    ],
)
def test_what_is_not_there_is_refused_by_name_and_its_neutral_value_is_not(
    server: FakeServer, field: str, value: Any, neutral: Any
):
    for ask in (server.chat, server.complete):
        refused = ask("hi", max_tokens=1, **{field: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        assert refused.json()["error"]["message"] == f"{field}: is not supported"
        assert ask("hi", max_tokens=1, **{field: neutral}).status_code == 200


GREEDY = {"temperature": 0, "ignore_eos": True}


def test_special_tokens_are_left_out_of_a_text_where_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch):
    asked: list[bool] = []
    encode = ByteTokenizer.encode

    def noting(
        self: ByteTokenizer, text: str, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        asked.append(add_special_tokens)
        return encode(self, text, add_special_tokens, max_tokens)

    monkeypatch.setattr(ByteTokenizer, "encode", noting)
    with fake_server() as server:
        for value in (None, True, False):
            server.complete("hi", max_tokens=1, add_special_tokens=value)
    assert asked == [True, True, False]


@pytest.mark.parametrize("route", ["chat", "complete"])
def test_salted_prompts_are_not_shared(server: FakeServer, route: str):
    ask = getattr(server, route)
    text = "a prompt of several blocks, all its own; " * 2

    def num_cached(**fields: Any) -> int:
        usage = ask(text, max_tokens=1, **fields).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert num_cached() < 16 <= num_cached()
    assert [num_cached(cache_salt="mine"), num_cached(cache_salt="mine") > 0, num_cached(cache_salt="yours")] == [
        *(0, True, 0)
    ]
    assert ask(text, cache_salt="").json()["error"]["param"] == "cache_salt"


def test_log_probabilities_of_a_prompt_come_as_vllm_has_them(server: FakeServer):
    choice = server.complete("abc", max_tokens=2, prompt_logprobs=2, **GREEDY).json()["choices"][0]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert [next(iter(entries)) for entries in rest] == [str(ord("b")), str(ord("c"))]
    assert rest[0][str(ord("b"))] == {"logprob": -0.5, "rank": 1, "decoded_token": "b"}
    assert [len(entries) for entries in rest] == [2, 2]
    assert choice["logprobs"] is None
    chat = server.chat("abc", max_tokens=2, prompt_logprobs=2, **GREEDY).json()
    assert chat["prompt_logprobs"][0] is None
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in server.complete("abc", max_tokens=1).json()["choices"][0]
    refused = server.complete("abc", stream=True, prompt_logprobs=1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_token_ids_come_with_a_text_where_they_are_wanted(server: FakeServer):
    fields = {"max_tokens": 4, "return_token_ids": True, **GREEDY}
    choice = server.complete("abc", **fields).json()["choices"][0]
    assert choice["prompt_token_ids"] == list(b"abc")
    assert bytes(choice["token_ids"]).decode() == choice["text"]
    chunks = [
        json.loads(line.removeprefix("data: "))["choices"][0]
        for line in server.complete("abc", stream=True, **fields).text.splitlines()
        if line.startswith("data: {")
    ]
    assert [id for chunk in chunks for id in chunk["token_ids"]] == choice["token_ids"]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [list(b"abc"), *[None] * (len(chunks) - 1)]


def test_token_ids_come_with_a_chat_where_they_are_wanted(server: FakeServer):
    fields = {"max_tokens": 4, "return_token_ids": True, **GREEDY}
    answer = server.chat("abc", **fields).json()
    [choice] = answer["choices"]
    prompt = list(ByteTokenizer().apply_chat_template([{"role": "user", "content": "abc"}]).encode())
    assert answer["prompt_token_ids"] == prompt
    assert bytes(choice["token_ids"]).decode() == choice["message"]["content"]
    events = [
        json.loads(line.removeprefix("data: "))
        for line in server.chat("abc", stream=True, **fields).text.splitlines()
        if line.startswith("data: {")
    ]
    assert [event.get("prompt_token_ids") for event in events] == [prompt, *[None] * (len(events) - 1)]
    ids = [id for event in events for id in event["choices"][0].get("token_ids", ())]
    assert ids == choice["token_ids"]


# -- what clients send that means nothing, or the usual


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "auto"},
        {"top_logprobs": 0},
        {"generation_config": '{"do_sample": false, "eos_token_id": 2, "max_length": null}'},
    ],
)
def test_fields_that_ask_for_nothing_are_as_absent(server: FakeServer, fields: dict[str, Any]):
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 5}
    response = server.post("/v1/chat/completions", {**body, **fields})
    assert response.status_code == 200, response.text
    assert response.json()["choices"] == server.post("/v1/chat/completions", body).json()["choices"]


@pytest.mark.parametrize("role", [{}, {"role": None}])
def test_a_message_without_a_role_is_the_users(server: FakeServer, role: dict[str, Any]):
    told = [
        server.post(
            "/v1/chat/completions", {"messages": [{"content": "hi", **given}], "temperature": 0, "max_tokens": 5}
        )
        for given in (role, {"role": "user"})
    ]
    assert told[0].status_code == 200, told[0].text
    assert told[0].json()["choices"] == told[1].json()["choices"]


@pytest.mark.parametrize(
    ("call", "same"),
    [
        (
            {"tool_calls": [{"id": "a", "type": "", "function": {"name": "f", "arguments": None}}]},
            {"tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        ),
    ],
)
def test_calls_of_a_history_may_be_none_or_empty(call: dict[str, Any], same: dict[str, Any]):
    read = [
        conversation_of([msgspec.convert({"role": "assistant", "content": "x", **given}, Message)])
        for given in (call, same)
    ]
    assert read[0] == read[1]


def test_transformers_chat_finds_its_model_and_gives_its_limits(server: FakeServer):
    told = server.post("/load_model", {"model": "mock"})
    assert told.headers["content-type"].startswith("text/event-stream")
    assert told.text == 'data: {"status":"ready","cached":true,"model":"mock"}\n\n'
    body = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
    config = json.dumps({"max_new_tokens": 3, "do_sample": False, "temperature": 1.5})
    answer = server.post("/v1/chat/completions", {**body, "generation_config": config}).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert ChatBody(messages=[], generation_config=config).params(None).temperature == 0
    own = server.post("/v1/chat/completions", {**body, "generation_config": config, "max_tokens": 4}).json()
    assert own["usage"]["completion_tokens"] == 4
    for text, field in (("{", "generation_config"), ('{"top_p": 2}', "generation_config.top_p")):
        assert (
            server.post("/v1/chat/completions", {**body, "generation_config": text}).json()["error"]["param"] == field
        )
