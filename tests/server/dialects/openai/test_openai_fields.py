"""Fields of OpenAI's and vLLM's requests: each one has its effect, or is refused by name."""

import json
from typing import Any

import pytest

from kvloom.rank.fake import ByteTokenizer
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

    assert [num_cached(), num_cached() > 0] == [0, True]
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
