"""Details that clients of OpenAI's and vLLM's servers read beside the answer."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvloom.contract.request import TokenLogprob
from kvloom.rank.fake import ByteTokenizer
from kvloom.server.dialects.openai.shapes import TextLogprobs, prompt_logprobs
from tests.support.models.templates import HERMES, R1, TemplateTokenizer
from tests.support.servers import FakeServer, fake_server

GREEDY = {"temperature": 0, "ignore_eos": True}
HI = {"role": "user", "content": "hi"}
BEGUN = {"role": "assistant", "content": "Well, "}
USAGE = {"include_usage": True, "continuous_usage_stats": True}


def ask(server: FakeServer, *messages: dict[str, Any], **fields: Any) -> Any:
    return server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4, **GREEDY, **fields})


def chunks(response: Any) -> list[dict[str, Any]]:
    lines = response.text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def refused(response: Any) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["param"]


# -- log-probabilities of text completions


@pytest.mark.parametrize("count", [0, 1, 3])
def test_top_logprobs_hold_the_chosen_token_and_so_many_others(server: FakeServer, count: int):
    found = server.complete("abc", max_tokens=5, logprobs=count, **GREEDY).json()["choices"][0]["logprobs"]
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert top[token] == logprob
        assert max(1, count) <= len(top) <= count + 1


def test_a_chosen_token_that_is_unlikely_comes_beside_the_likely_ones():
    value = TokenLogprob(ord("z"), -9.0, ((ord("a"), -0.1), (ord("b"), -2.0)))
    found = TextLogprobs(ByteTokenizer(), 2).of([(ord("z"), value)])
    assert found["top_logprobs"] == [{"z": -9.0, "a": -0.1, "b": -2.0}]


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_count_characters_also_of_several_tokens(server: FakeServer, stream: bool):
    fields = {"max_tokens": 2, "echo": True, "logprobs": 0, **GREEDY}
    whole = server.complete("aé€b", **fields).json()["choices"][0]
    shown = (
        [whole] if not stream else [one["choices"][0] for one in chunks(server.complete("aé€b", stream=True, **fields))]
    )
    offsets = [offset for choice in shown for offset in choice["logprobs"]["text_offset"]]
    assert offsets == [0, 1, 1, 2, 2, 2, 3, 4, 5]
    assert whole["text"][offsets[-1]] == whole["logprobs"]["tokens"][-1]


class Shy(ByteTokenizer):
    """Vowels are special tokens."""

    def is_special(self, token_id: int) -> bool:
        return super().is_special(token_id) or token_id in b"aeiou"


@pytest.mark.parametrize("skips", [True, False])
def test_offsets_leave_out_special_tokens_as_the_text_does(skips: bool):
    fields = {"max_tokens": 60, "echo": True, "logprobs": 0, "skip_special_tokens": skips, "seed": 1, **GREEDY}
    with fake_server(tokenizer=Shy(), has_eos=False) as server:
        whole = server.complete("aeb", **fields).json()["choices"][0]
        pieces = [one["choices"][0]["logprobs"] for one in chunks(server.complete("aeb", stream=True, **fields))]
    found = whole["logprobs"]
    assert (len(whole["text"]) < 63) is skips
    assert found["text_offset"][:4] == [0, 1, 2, 3]
    for offset, token in zip(found["text_offset"], found["tokens"], strict=True):
        assert whole["text"].startswith(token, offset) or (skips and token in ("a", "e", "i", "o", "u", "<eos>"))
    assert [offset for piece in pieces for offset in piece["text_offset"]] == found["text_offset"]


def test_an_echo_shows_so_many_likely_tokens_as_each_field_asks_for():
    """The engine is asked once for the prompt's, for as many as the larger of both fields says."""
    value = TokenLogprob(ord("a"), -0.1, ((ord("a"), -0.1), (ord("b"), -2.0), (ord("c"), -3.0)))
    assert TextLogprobs(ByteTokenizer(), 2).of([(ord("a"), value)])["top_logprobs"] == [{"a": -0.1, "b": -2.0}]
    [shown] = prompt_logprobs(ByteTokenizer(), [value], 1)
    assert shown is not None
    assert list(shown) == [str(ord("a"))]


# -- limits


def test_stream_options_need_a_stream(server: FakeServer):
    for send in (server.chat, server.complete):
        assert refused(send("hi", stream_options={"include_usage": True})) == (400, "stream_options")
        assert refused(send("hi", stream=False, stream_options={})) == (400, "stream_options")
        assert send("hi", max_tokens=1, stream_options=None).status_code == 200


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_cannot_fit_beside_its_prompt_is_refused(field: str, stream: bool):
    with fake_server(max_seq_len=64) as server:
        num_prompt = ask(server, HI).json()["usage"]["prompt_tokens"]
        body = {"messages": [HI], "stream": stream, **GREEDY}
        assert server.post("/v1/chat/completions", {**body, field: 64 - num_prompt}).status_code == 200
        response = server.post("/v1/chat/completions", {**body, field: 65 - num_prompt})
        assert refused(response) == (400, field)
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith(
            f"This model's maximum context length is 64 tokens. However, you requested 65 tokens ({num_prompt} in"
        )


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_length_that_no_message_can_count_is_refused_under_its_name(server: FakeServer, field: str):
    assert refused(server.chat("hi", **{field: 10**15})) == (400, field)


def test_a_text_completion_that_cannot_fit_is_refused_too():
    with fake_server(max_seq_len=64) as server:
        assert server.complete("x" * 40, max_tokens=24, **GREEDY).json()["usage"]["total_tokens"] == 64
        assert refused(server.complete(["x", "x" * 40], max_tokens=25)) == (400, "max_tokens")
        assert server.complete("x" * 60, **GREEDY).json()["usage"]["total_tokens"] == 64, "16 was nobody's wish"


def test_other_dialects_answer_as_far_as_the_context_goes():
    with fake_server(max_seq_len=64, has_eos=False) as server:
        message = server.post("/v1/messages", {"messages": [HI], "max_tokens": 32000}).json()
        assert message["usage"]["input_tokens"] + message["usage"]["output_tokens"] == 64
        response = server.post("/v1/responses", {"input": "hi", "max_output_tokens": 32000}).json()
        assert response["usage"]["total_tokens"] == 64


def test_a_least_length_above_the_greatest_is_refused(server: FakeServer):
    for send in (server.chat, server.complete):
        assert refused(send("hi", max_tokens=5, min_tokens=6)) == (400, "min_tokens")
        assert send("hi", max_tokens=5, min_tokens=5).status_code == 200


# -- further fields of answers


def test_every_chunk_has_usage_where_it_is_wanted_from_the_role_on(server: FakeServer):
    events = chunks(ask(server, HI, stream=True, stream_options=USAGE))
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 1, 2, 3, 4, 4, 4]


def test_a_chat_tells_which_stop_ended_it(server: FakeServer):
    text = ask(server, HI, max_tokens=12).json()["choices"][0]["message"]["content"]
    choice = ask(server, HI, max_tokens=12, stop=text[3:5]).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", text[3:5])
    choice = ask(server, HI, max_tokens=12, stop_token_ids=[ord(text[3])]).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ord(text[3]))
    last = chunks(ask(server, HI, max_tokens=12, stop=text[3:5], stream=True))[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", text[3:5])
    assert ask(server, HI).json()["choices"][0]["stop_reason"] is None


def test_the_list_of_models_may_end_with_a_slash(server: FakeServer):
    assert server.client.get("/v1/models/").json() == server.client.get("/v1/models").json()


@pytest.mark.parametrize("path", ["/health", "/ping", "/v2/health/live", "/v2/health/ready", "/v2/models/mock/ready"])
def test_an_empty_answer_has_no_content_type(server: FakeServer, path: str):
    response = server.client.get(path)
    assert (response.status_code, response.content) == (200, b"")
    assert "content-type" not in response.headers


def test_of_best_of_chats_those_of_the_highest_mean_log_probability_are_given_best_first(server: FakeServer):
    """The answers have different lengths: the sum instead of the mean would prefer short ones."""
    fields = {"max_tokens": 40, "seed": 4, "temperature": 1, "ignore_eos": False, "logprobs": True}
    every = ask(server, HI, n=16, **fields).json()["choices"]
    logprobs = [[token["logprob"] for token in choice["logprobs"]["content"]] for choice in every]
    by_mean = sorted(range(16), key=lambda i: -sum(logprobs[i]) / len(logprobs[i]))[:3]
    assert by_mean != sorted(range(16), key=lambda i: -sum(logprobs[i]))[:3], "this shows nothing"
    best = ask(server, HI, n=3, best_of=16, **fields).json()["choices"]
    assert [one["message"]["content"] for one in best] == [every[i]["message"]["content"] for i in by_mean]
    assert [one["index"] for one in best] == [0, 1, 2]


def test_best_of_is_at_least_n_and_cannot_be_streamed(server: FakeServer):
    assert refused(ask(server, HI, best_of=1, n=2)) == (400, "best_of")
    assert refused(ask(server, HI, best_of=2, stream=True)) == (400, "best_of")


# -- contents of conversations


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": None, "refusal": "No."},
    ],
)
def test_what_the_assistant_refused_is_its_text(message: dict[str, Any]):
    with fake_server(tokenizer=TemplateTokenizer(HERMES)) as server:
        ask(server, HI, message, HI)
        assert TemplateTokenizer.rendered[-1] == "user: hi\nassistant: No.\nuser: hi\nassistant: "


def test_a_refusal_is_the_assistants_only(server: FakeServer):
    parts = {"role": "user", "content": [{"type": "refusal", "refusal": "No."}]}
    assert refused(ask(server, parts)) == (400, "messages[0].content[0]")


# -- the model continues the last message


def _prompt(server: FakeServer, *messages: dict[str, Any], **fields: Any) -> str:
    answer = ask(server, *messages, return_token_ids=True, **fields)
    assert answer.status_code == 200, answer.text
    return bytes(answer.json()["prompt_token_ids"]).decode()


@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": False}])
def test_the_final_message_is_continued_where_it_ends(fields: dict[str, Any]):
    with fake_server(tokenizer=TemplateTokenizer(HERMES)) as server:
        assert _prompt(server, HI, BEGUN, continue_final_message=True, **fields) == "user: hi\nassistant: Well, "
        assert _prompt(server, BEGUN, HI, continue_final_message=True) == "assistant: Well, \nuser: hi"
        assert _prompt(server, HI, add_generation_prompt=False) == "user: hi\n"
        tokens = server.post("/tokenize", {"messages": [HI, BEGUN], "continue_final_message": True}).json()["tokens"]
        assert bytes(tokens).decode() == "user: hi\nassistant: Well, "


def test_a_message_is_not_continued_and_followed_by_another(server: FakeServer):
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refused(ask(server, HI, BEGUN, **both)) == (400, "continue_final_message")
    assert refused(server.post("/tokenize", {"messages": [HI], **both})) == (400, "continue_final_message")


def test_a_template_that_leaves_the_message_out_cannot_continue_it():
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with fake_server(tokenizer=TemplateTokenizer(template)) as server:
        assert refused(ask(server, HI, BEGUN, continue_final_message=True)) == (400, "continue_final_message")


@pytest.mark.parametrize("template", ["", HERMES])
def test_a_message_that_ends_with_calls_cannot_be_continued(template: str):
    """Templates write calls behind the text; to continue the text would leave them out."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    with fake_server(tokenizer=TemplateTokenizer(template), max_seq_len=2048) as server:
        called = {**BEGUN, "tool_calls": [call]}
        assert refused(ask(server, HI, called, continue_final_message=True)) == (400, "continue_final_message")
        assert ask(server, HI, called, HI).status_code == 200


def test_reasoning_that_is_continued_is_reasoning():
    with fake_server(tokenizer=TemplateTokenizer(R1), has_eos=False) as server:
        thinking = {"role": "assistant", "content": "<think>\nso"}
        message = ask(server, HI, thinking, continue_final_message=True).json()["choices"][0]["message"]
        assert (bool(message["reasoning"]), message["content"]) == (True, "")
        answered = {"role": "assistant", "content": "<think>\nso</think>Well"}
        message = ask(server, HI, answered, continue_final_message=True).json()["choices"][0]["message"]
        assert ("reasoning" in message, bool(message["content"])) == (False, True)


@pytest.mark.parametrize(
    ("messages", "fields", "role", "echo"),
    [
        ([HI, BEGUN], {"continue_final_message": True}, "assistant", "Well, "),
        ([HI, BEGUN], {}, "assistant", "Well, "),
        ([HI], {}, "assistant", ""),
        ([HI], {"add_generation_prompt": False}, "user", "hi"),
    ],
)
def test_an_echo_begins_with_the_last_message_of_the_answers_role(
    server: FakeServer, messages: list[dict[str, Any]], fields: dict[str, Any], role: str, echo: str
):
    plain = ask(server, *messages, **fields).json()["choices"][0]["message"]
    echoing = ask(server, *messages, echo=True, n=2, **fields).json()["choices"]
    assert [choice["message"]["content"] for choice in echoing] == [echo + plain["content"]] * 2
    assert {choice["message"]["role"] for choice in echoing} == {role}
    deltas = [one["choices"][0]["delta"] for one in chunks(ask(server, *messages, echo=True, stream=True, **fields))]
    assert deltas[0]["role"] == role
    assert "".join(delta.get("content", "") for delta in deltas) == echo + plain["content"]


def test_to_those_who_send_anthropics_header_models_are_listed_page_by_page():
    names = [f"m{number}" for number in range(5)]
    with fake_server(names=names) as server:

        def page(query: str = "") -> tuple[list[str], bool, str | None, str | None]:
            told = server.client.get(f"/v1/models{query}", headers={"anthropic-version": "2023-06-01"}).json()
            return [one["id"] for one in told["data"]], told["has_more"], told["first_id"], told["last_id"]

        assert page() == (names, False, "m0", "m4")
        assert page("?limit=2") == (["m0", "m1"], True, "m0", "m1")
        assert page("?limit=2&after_id=m1") == (["m2", "m3"], True, "m2", "m3")
        assert page("?limit=2&after_id=m3") == (["m4"], False, "m4", "m4")
        assert page("?limit=2&before_id=m3") == (["m1", "m2"], True, "m1", "m2")
        assert page("?limit=2&before_id=m1") == (["m0"], False, "m0", "m0")
        assert page("?after_id=m4") == ([], False, None, None)
        response = server.client.get("/v1/models?after_id=x", headers={"anthropic-version": "2023-06-01"})
        assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


# -- predicted outputs


@pytest.fixture(scope="module")
def guessing() -> Iterator[FakeServer]:
    """Its steps take so long that rows of drafts always pay."""
    with fake_server(num_speculative_tokens=-1, step_s=0.003) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("in_parts", [False, True])
def test_a_predicted_answer_is_the_answer_and_its_tokens_are_counted(
    guessing: FakeServer, stream: bool, in_parts: bool
):
    fields = {"max_tokens": 40, "stream": stream, **({"stream_options": {"include_usage": True}} if stream else {})}
    plain = ask(guessing, HI, max_tokens=40).json()
    text = plain["choices"][0]["message"]["content"]
    content = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}] if in_parts else text
    answer = ask(guessing, HI, prediction={"type": "content", "content": content}, **fields)
    *parts, last = chunks(answer) if stream else [answer.json()]
    found = "".join(part["choices"][0]["delta"].get("content", "") for part in parts) if stream else ""
    assert (found or last["choices"][0]["message"]["content"]) == text
    details = last["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 10
    assert details["rejected_prediction_tokens"] >= 0
    assert set(plain["usage"]["completion_tokens_details"]) == {"reasoning_tokens"}


def test_a_prediction_is_a_text(server: FakeServer):
    assert refused(ask(server, HI, prediction={"type": "content", "content": 3})) == (400, "prediction.content")
