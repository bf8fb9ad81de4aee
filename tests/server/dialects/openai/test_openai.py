"""The OpenAI routes over HTTP: answers, streams, errors (wire shapes as OpenAI documents them)."""

import json
from typing import Any

import pytest

from kvloom.rank.byte_tokenizer import ByteTokenizer
from kvloom.server.serving.options import WireOptions
from tests.support.servers import MODEL, FakeServer, fake_server, greedy_answer

GREEDY = {"temperature": 0, "ignore_eos": True}


def truth(prompt: str, count: int) -> str:
    return bytes(greedy_answer(ByteTokenizer().encode(prompt), count)).decode()


def chat_prompt(text: str) -> str:
    return ByteTokenizer().apply_chat_template([{"role": "user", "content": text}])


def events_of(response: Any) -> list[dict[str, Any]]:
    """The JSON events of a stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def error_of(response: Any) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_a_chat_answer_has_every_key_that_openai_documents(server: FakeServer):
    answer = server.chat("hello", max_tokens=7, **GREEDY).json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == MODEL
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": truth(chat_prompt("hello"), 7), "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(chat_prompt("hello"))
    assert (usage["completion_tokens"], usage["total_tokens"]) == (7, usage["prompt_tokens"] + 7)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_streamed_chat_joins_to_the_whole_answer(server: FakeServer):
    response = server.chat("hello", max_tokens=9, stream=True, **GREEDY)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({(event["id"], event["created"]) for event in events}) == 1
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == truth(
        chat_prompt("hello"), 9
    )
    last = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert events[-1]["choices"][0] == last
    assert all("stop_reason" not in event["choices"][0] for event in events[:-1])
    assert all("usage" not in event for event in events)


def test_usage_comes_in_a_last_event_when_asked_for(server: FakeServer):
    options = {"include_usage": True}
    events = events_of(server.chat("hello", max_tokens=3, stream=True, stream_options=options, **GREEDY))
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 3
    options["continuous_usage_stats"] = True
    events = events_of(server.chat("hello", max_tokens=3, stream=True, stream_options=options, **GREEDY))
    assert [event["usage"]["completion_tokens"] for event in events[1:4]] == [1, 2, 3]


def test_n_choices_are_numbered_and_differ(server: FakeServer):
    choices = server.chat("hello", n=3, seed=1, max_tokens=20, ignore_eos=True).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in choices}) == 3
    again = server.chat("hello", n=3, seed=1, max_tokens=20, ignore_eos=True).json()["choices"]
    assert again == choices


def test_a_stream_of_n_choices_carries_each_of_them_whole(server: FakeServer):
    fields = {"n": 3, "seed": 5, "max_tokens": 12, "ignore_eos": True}
    whole = [choice["message"]["content"] for choice in server.chat("hello", **fields).json()["choices"]]
    texts = ["", "", ""]
    for event in events_of(server.chat("hello", stream=True, **fields)):
        choice = event["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == whole


def test_a_stop_string_ends_the_answer_before_it(server: FakeServer):
    text = truth("abc", 12)
    stop = text[4:6]
    choice = server.complete("abc", max_tokens=12, stop=stop, **GREEDY).json()["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_chat_log_probabilities(server: FakeServer):
    answer = server.chat("hello", max_tokens=2, logprobs=True, top_logprobs=2, **GREEDY).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == list(truth(chat_prompt("hello"), 2))
    assert content[0]["bytes"] == list(content[0]["token"].encode())
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2]
    streamed = events_of(server.chat("hello", max_tokens=2, logprobs=True, top_logprobs=2, stream=True, **GREEDY))
    found = [event["choices"][0]["logprobs"] for event in streamed if event["choices"][0]["logprobs"]]
    assert [entry for part in found for entry in part["content"]] == content


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_log_probabilities_covers_prompt_and_answer(server: FakeServer, stream: bool):
    response = server.complete("abc", max_tokens=2, echo=True, logprobs=1, stream=stream, **GREEDY)
    choices = [event["choices"][0] for event in (events_of(response) if stream else [response.json()])]
    text = "".join(choice["text"] for choice in choices)
    assert text == "abc" + truth("abc", 2)
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    logprobs = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    assert tokens == list(text)
    assert logprobs[0] is None
    assert None not in logprobs[1:]
    assert offsets == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_prompt_can_be_scored_without_an_answer(server: FakeServer, max_tokens: int):
    choice = server.complete("abcd", max_tokens=max_tokens, echo=True, logprobs=0, **GREEDY).json()["choices"][0]
    assert choice["text"] == "abcd" + truth("abcd", max_tokens)
    assert len(choice["logprobs"]["tokens"]) == 4 + max_tokens


def test_prompts_may_be_texts_or_token_ids_one_or_many(server: FakeServer):
    one = server.complete("abc", max_tokens=4, **GREEDY).json()["choices"]
    assert server.complete([97, 98, 99], max_tokens=4, **GREEDY).json()["choices"] == one
    many = server.complete(["abc", "xyz"], n=1, max_tokens=4, **GREEDY).json()
    assert [choice["text"] for choice in many["choices"]] == [truth("abc", 4), truth("xyz", 4)]
    assert [choice["index"] for choice in many["choices"]] == [0, 1]
    assert many["usage"]["prompt_tokens"] == 6
    lists = server.complete([[97, 98, 99], [120, 121, 122]], max_tokens=4, **GREEDY).json()
    assert lists["choices"] == many["choices"]


def test_best_of_gives_the_n_best_of_them(server: FakeServer):
    answer = server.complete("abc", max_tokens=4, n=2, best_of=5, seed=1, ignore_eos=True).json()
    assert len(answer["choices"]) == 2
    assert answer["choices"][0]["logprobs"] is None


def test_cached_tokens_are_counted(server: FakeServer):
    prompt = "the same long beginning of a prompt, twice over, and then some more of it"
    server.complete(prompt, max_tokens=1)
    usage = server.complete(prompt, max_tokens=1).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1


def test_of_several_answers_only_what_none_had_to_compute_counts_as_cached(server: FakeServer):
    """The first one computes the prompt, and the others find it."""
    prompt = "1 prompt of which nobody has heard before, until now"
    counts = [server.complete(prompt, n=4) for _ in range(2)]
    cached = [each.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for each in counts]
    assert cached == [0, len(prompt) - 1]


def test_models_are_listed_and_looked_up(server: FakeServer):
    listed = server.client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert listed["data"][0]["id"] == MODEL
    assert listed["data"][0]["max_model_len"] == 2048
    assert server.client.get(f"/v1/models/{MODEL}").json() == listed["data"][0]
    response = server.client.get("/v1/models/none")
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


def test_content_may_be_a_list_of_text_parts(server: FakeServer):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": 3, **GREEDY}
    content = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert content == truth(chat_prompt("hel\nlo"), 3)


CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "hi", "max_tokens": 2}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**CHAT, "temperature": 2.5}, "temperature"),
        ({**CHAT, "temperature": "hot"}, "temperature"),
        ({**CHAT, "top_p": 0}, "top_p"),
        ({**CHAT, "top_p": -1}, "top_p"),
        ({**CHAT, "n": 0}, "n"),
        ({**CHAT, "n": 10**9}, "n"),
        ({**CHAT, "max_tokens": 0}, "max_tokens"),
        ({**CHAT, "max_tokens": -5}, "max_tokens"),
        ({**CHAT, "max_tokens": 1.5}, "max_tokens"),
        ({**CHAT, "max_tokens": 10**30}, "max_tokens"),
        ({**CHAT, "seed": 2**63}, "seed"),
        ({**CHAT, "stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({**CHAT, "stop": [""]}, "stop"),
        ({**CHAT, "stop": [1]}, "stop[0]"),
        ({**CHAT, "frequency_penalty": 3}, "frequency_penalty"),
        ({**CHAT, "logit_bias": {"x": 1}}, "logit_bias"),
        ({**CHAT, "logit_bias": {"999999": 1}}, "logit_bias"),
        ({**CHAT, "top_logprobs": 3}, "top_logprobs"),
        ({**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({**CHAT, "messages": []}, "messages"),
        ({**CHAT, "messages": "hi"}, "messages"),
        ({**CHAT, "messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].image_url",
        ),
        ({**CHAT, "messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        ({**CHAT, "tools": [{"type": "function"}]}, "tools[0].function"),
        ({**CHAT, "functions": [{"name": "f"}]}, "functions"),
        ({**CHAT, "response_format": {"type": "xml"}}, "response_format.type"),
        ({**CHAT, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({**CHAT, "guided_regex": "("}, "guided_regex"),
        ({**CHAT, "guided_choice": []}, "guided_choice"),
        ({**CHAT, "guided_json": "{", "guided_choice": ["a"]}, "guided_choice"),
        ({**CHAT, "structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
        ({"model": MODEL}, "messages"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_chat_body_is_a_400_that_names_the_field(
    server: FakeServer, body: dict[str, Any], param: str, stream: bool
):
    response = server.post("/v1/chat/completions", {**body, "stream": stream})
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**TEXT, "prompt": ""}, "prompt"),
        ({**TEXT, "prompt": []}, "prompt"),
        ({**TEXT, "prompt": [[]]}, "prompt"),
        ({**TEXT, "prompt": ["a", 1]}, "prompt"),
        ({**TEXT, "prompt": [1, 10**6]}, "prompt"),
        ({**TEXT, "prompt": [-1]}, "prompt"),
        ({**TEXT, "prompt": {"a": 1}}, "prompt"),
        ({**TEXT, "prompt": "x" * 2048}, "prompt"),
        ({**TEXT, "prompt": ["a"] * 1025}, "prompt"),
        ({**TEXT, "prompt": ["a"] * 9, "n": 128}, "prompt"),
        ({**TEXT, "best_of": 1, "n": 2}, "best_of"),
        ({**TEXT, "best_of": 3, "stream": True}, "best_of"),
        ({**TEXT, "max_tokens": 0}, "max_tokens"),
        ({**TEXT, "suffix": "end"}, "suffix"),
        ({**TEXT, "stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({**TEXT, "stop_token_ids": [1, 10**6], "min_tokens": 1}, "stop_token_ids"),
        ({**TEXT, "stop_token_ids": [2**70]}, "stop_token_ids"),
        ({"model": MODEL}, "prompt"),
    ],
)
def test_a_bad_text_body_is_a_400_that_names_the_field(server: FakeServer, body: dict[str, Any], param: str):
    response = server.post("/v1/completions", body)
    assert response.status_code == 400
    assert error_of(response)["param"] == param


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe{}", b"[" * 200_000, b'{"a":' * 100_000, b"null", b'"text"', b"[]", b'{"model": "mo', b"NaN"],
)
def test_a_body_that_is_no_json_object_is_a_400(server: FakeServer, body: bytes):
    for route in ("/v1/chat/completions", "/v1/completions"):
        response = server.client.post(route, content=body)
        assert response.status_code == 400
        assert error_of(response)["message"]


def test_unknown_keys_are_ignored(server: FakeServer):
    assert server.chat("hi", max_tokens=1, user="me", metadata={"a": "b"}, store=True, frobnicate=1).status_code == 200


def test_any_model_name_is_served_by_the_default_model_under_its_own_name(server: FakeServer):
    """The sample of spec 3.3.2.3.3 requests gpt-3.5-turbo."""
    answer = server.post("/v1/chat/completions", {**CHAT, "model": "gpt-3.5-turbo"}).json()
    assert answer["model"] == MODEL
    assert server.post("/v1/chat/completions", {"messages": CHAT["messages"]}).status_code == 200


def test_with_validation_an_unknown_model_is_a_404_and_a_missing_one_a_400():
    with fake_server(options=WireOptions(validates_model=True)) as server:
        response = server.post("/v1/chat/completions", {**CHAT, "model": "gpt-9"})
        assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
        assert server.post("/v1/chat/completions", {"messages": CHAT["messages"]}).status_code == 400
