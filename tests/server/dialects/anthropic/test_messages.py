"""Anthropic's /v1/messages over HTTP: the message, its events and their order, errors in Anthropic's format."""

import json
from typing import Any

import httpx
import pytest

from kvloom.contract.request import Delta, FinishReason
from kvloom.contract.sampling import SamplingParams
from kvloom.rank.fake import ByteTokenizer, FakeRunner, fake_answer
from kvloom.server.chat.output import ChatOutput
from kvloom.server.chat.reasoning import ReasoningSplitter
from kvloom.server.dialects.anthropic.shapes import MessageWriter, Told
from kvloom.server.serving.options import WireOptions
from tests.support.servers import MODEL, FakeServer, fake_server

PATH = "/v1/messages"
HELLO = [{"role": "user", "content": "hello"}]
KEY = "kvl-0123456789abcdef0123456789abcdef"


def prompt_of(*messages: tuple[str, str]) -> str:
    return ByteTokenizer().apply_chat_template([{"role": role, "content": text} for role, text in messages])


def truth(prompt: str, count: int) -> str:
    ids = ByteTokenizer().encode(prompt)
    return ByteTokenizer().decode(fake_answer(ids, SamplingParams(temperature=0), 0, count))


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 8, "messages": HELLO, "temperature": 0, "ignore_eos": True, **fields}


def ask(server: FakeServer, **fields: Any) -> Any:
    response = server.post(PATH, body(**fields))
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: FakeServer, **fields: Any) -> list[dict[str, Any]]:
    """The data of each event; the names in the data must equal those of the event lines."""
    response = server.post(PATH, body(stream=True, **fields))
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_message_has_every_key_that_anthropic_documents(server: FakeServer):
    prompt = prompt_of(("user", "hello"))
    answer = ask(server)
    assert answer.pop("id").startswith("msg_")
    assert answer.pop("usage")["output_tokens"] == 8
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": truth(prompt, 8)}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
    }


def test_cached_tokens_are_counted_beside_the_others(server: FakeServer):
    messages = [{"role": "user", "content": "a long beginning that comes twice " * 3}]
    first, second = (ask(server, messages=messages)["usage"] for _ in range(2))
    assert first["cache_read_input_tokens"] < 16, "the mark of a message, and how another one began"
    assert second["cache_read_input_tokens"] >= 96
    sums = [each["input_tokens"] + each["cache_read_input_tokens"] for each in (first, second)]
    assert sums[0] == sums[1]


def test_why_a_message_ended(server: FakeServer):
    text = truth(prompt_of(("user", "hello")), 8)
    answer = ask(server, stop_sequences=[text[3:5], "never"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", text[3:5])
    assert answer["content"][0]["text"] == text[: text.index(text[3:5])]
    answer = ask(server, max_tokens=500, ignore_eos=False)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)


def test_system_and_blocks_become_the_conversation(server: FakeServer):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "two"},
                {"type": "text", "text": "three"},
            ],
        },
        {"role": "user", "content": "four"},
    ]
    said = (("user", "one"), ("assistant", "two\nthree"), ("user", "four"))
    for system in ("Count.", [{"type": "text", "text": "Count."}]):
        answer = ask(server, system=system, messages=messages)
        assert answer["content"][0]["text"] == truth(prompt_of(("system", "Count."), *said), 8)


def test_a_last_message_of_the_assistant_is_gone_on_with(server: FakeServer):
    answer = ask(server, messages=[*HELLO, {"role": "assistant", "content": "Once upon"}])
    assert answer["content"][0]["text"] == truth(prompt_of(("user", "hello")) + "Once upon", 8)


def test_events_come_in_anthropics_order_and_build_the_message(server: FakeServer):
    events = stream(server)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] + start["usage"]["cache_read_input_tokens"] == len(
        prompt_of(("user", "hello"))
    )
    text = "".join(event["delta"]["text"] for event in events[3:-3])
    assert text == ask(server)["content"][0]["text"]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 8


def test_an_answer_of_no_text_has_no_block(server: FakeServer):
    text = truth(prompt_of(("user", "hello")), 8)
    assert ask(server, stop_sequences=[text[0]])["content"] == []
    kinds = [event["type"] for event in stream(server, stop_sequences=[text[0]])]
    assert kinds == ["message_start", "ping", "message_delta", "message_stop"]


def test_a_schema_is_followed(server: FakeServer):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    schema["additionalProperties"] = False
    config = {"format": {"type": "json_schema", "schema": schema}}
    answer = ask(server, output_config=config, temperature=1, seed=3, max_tokens=100, ignore_eos=False)
    assert set(json.loads(answer["content"][0]["text"])) == {"n"}


def test_tokens_of_a_prompt_are_counted(server: FakeServer):
    response = server.post(f"{PATH}/count_tokens", {"model": MODEL, "system": "Count.", "messages": HELLO})
    assert response.json() == {"input_tokens": len(prompt_of(("system", "Count."), ("user", "hello")))}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages: must hold one of the user"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].source: is required",
        ),
        ({"system": [{"type": "image"}]}, "system[0]: must be a text block"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_p": 0}, "top_p: must be above 0"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences: takes up to 16"),
        ({"mcp_servers": [{}]}, "mcp_servers: is not supported"),
        ({"container": "c"}, "container: is not supported"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: is required"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
            "output_config.format.schema",
        ),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "prompt is too long: "),
    ],
)
def test_bad_input_is_named_in_anthropics_shape(server: FakeServer, fields: dict[str, Any], words: str):
    for is_streamed in (False, True):
        response = server.post(PATH, body(stream=is_streamed, **fields))
        assert response.status_code == 400
        answer = response.json()
        assert (answer["type"], set(answer["error"])) == ("error", {"type", "message"})
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["error"]["message"].startswith(words)


def test_every_other_error_has_that_shape_too():
    with fake_server(options=WireOptions(validates_model=True), max_body_bytes=2000) as server:
        found = [
            server.post(PATH, body(model="other")),
            server.post(f"{PATH}/count_tokens", {"model": "other", "messages": HELLO}),
            server.post(f"{PATH}/nothing", {}),
            server.client.get(PATH),
            server.post(PATH, body(system="x" * 3000)),
        ]
        assert [(response.status_code, response.json()["error"]["type"]) for response in found] == [
            (404, "not_found_error"),
            (404, "not_found_error"),
            (404, "not_found_error"),
            (405, "invalid_request_error"),
            (413, "request_too_large"),
        ]
        server.health.is_draining = True
        response = server.post(PATH, body())
        assert (response.status_code, response.json()["error"]["type"]) == (529, "overloaded_error")


def test_a_key_may_come_as_anthropics_clients_send_it():
    with fake_server(keys=[KEY]) as server:
        refused = httpx.post(server.url + PATH, json=body())
        assert (refused.status_code, refused.json()["type"]) == (401, "error")
        assert refused.json()["error"]["type"] == "authentication_error"
        headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}
        assert httpx.post(server.url + PATH, json=body(), headers=headers).status_code == 200


def test_a_model_that_fails_in_the_middle_is_an_error_event(monkeypatch: pytest.MonkeyPatch):
    run, steps = FakeRunner.run, []

    def failing(runner: FakeRunner, batch: Any) -> Any:
        steps.append(batch)
        if len(steps) == 5:
            raise RuntimeError("a kernel broke")
        return run(runner, batch)

    monkeypatch.setattr(FakeRunner, "run", failing)
    with fake_server() as server:
        events = stream(server)
    assert [event["type"] for event in events][:3] == ["message_start", "ping", "content_block_start"]
    assert (events[-1]["type"], events[-1]["error"]["type"]) == ("error", "api_error")


# -- newer clients


ASKED = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_compute_and_keep_the_prompt(server: FakeServer, stream: bool):
    text = f"a long prompt that is computed once {stream} " * 20
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 0, "stream": stream}
    response = server.post("/v1/messages", body)
    assert response.status_code == 200, response.text
    if not stream:
        assert (response.json()["content"], response.json()["usage"]["output_tokens"]) == ([], 0)
    again = server.post("/v1/messages", {**body, "max_tokens": 1, "stream": False}).json()
    assert again["usage"]["cache_read_input_tokens"] > 0


def test_an_answer_that_the_context_ends_says_so():
    with fake_server(max_seq_len=64) as server:
        body = {**ASKED, "ignore_eos": True}
        assert server.post("/v1/messages", {**body, "max_tokens": 2}).json()["stop_reason"] == "max_tokens"
        answer = server.post("/v1/messages", {**body, "max_tokens": 1000}).json()
        assert answer["stop_reason"] == "model_context_window_exceeded"


@pytest.mark.parametrize(
    "thinking",
    [{"type": "between_tools"}, {"type": "enabled", "budget_tokens": 5}, {"type": "adaptive", "display": "omitted"}],
)
def test_thinking_is_asked_of_a_model_that_does_not_think(server: FakeServer, thinking: dict[str, Any]):
    response = server.post("/v1/messages", {**ASKED, "max_tokens": 2, "thinking": thinking})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("omits", [False, True])
def test_thinking_is_counted_and_left_out_where_it_is_omitted(omits: bool):
    writer = MessageWriter("m", "m", Told(2, omits_thinking=omits), ChatOutput(ReasoningSplitter(True)))
    deltas = [
        Delta("r", "deep", (1,)),
        Delta("r", "</think>", (2,)),
        Delta("r", "so", (3,), finish_reason=FinishReason.EOS),
    ]
    frames = b"".join(writer.add(0, delta) for delta in deltas).decode()
    first, last = writer.message["content"]
    assert (first["type"], first["thinking"]) == ("thinking", "" if omits else "deep")
    assert last == {"type": "text", "text": "so"}
    assert ("deep" in frames) is not omits
    assert writer.message["usage"]["output_tokens_details"]["thinking_tokens"] >= 1


def test_names_of_tools_may_have_128_letters_and_errors_name_the_input_schema(server: FakeServer):
    tool = {"name": "a" * 128, "input_schema": {"type": "object"}}
    assert server.post("/v1/messages", {**ASKED, "max_tokens": 1, "tools": [tool]}).status_code == 200
    tool["name"] += "a"
    refused = server.post("/v1/messages", {**ASKED, "max_tokens": 1, "tools": [tool]})
    assert "tools[0].name: must be 1 to 128 letters" in refused.text
    wrong = {"name": "a", "input_schema": {"type": "object", "properties": {"a": {"type": "nothing"}}}}
    refused = server.post("/v1/messages", {**ASKED, "max_tokens": 1, "tools": [wrong], "tool_choice": {"type": "any"}})
    assert "tools[0].input_schema" in refused.text


def test_the_request_id_is_where_the_clients_look_for_it(server: FakeServer):
    for body in ({**ASKED, "max_tokens": 1}, {}):
        headers = server.post("/v1/messages", body).headers
        assert headers["request-id"] == headers["x-request-id"]
    assert "request-id" not in server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).headers
