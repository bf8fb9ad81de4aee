"""OpenAI's /v1/responses over HTTP: the response object, events and their order, structured output, refusals."""

import json
from typing import Any

import pytest

from kvloom.contract.sampling import SamplingParams
from kvloom.rank.fake import ByteTokenizer, FakeRunner, fake_answer
from kvloom.server.serving.options import WireOptions
from tests.support.servers import MODEL, FakeServer, fake_server

GREEDY = {"temperature": 0, "ignore_eos": True}
TEXT_EVENTS = [
    *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
    *("response.output_text.delta", "response.output_text.done", "response.content_part.done"),
    "response.output_item.done",
]


def prompt_of(*messages: tuple[str, str]) -> str:
    return ByteTokenizer().apply_chat_template([{"role": role, "content": text} for role, text in messages])


def truth(prompt: str, count: int) -> str:
    ids = ByteTokenizer().encode(prompt)
    return ByteTokenizer().decode(fake_answer(ids, SamplingParams(temperature=0), 0, count))


def respond(server: FakeServer, input: Any = "hello", **fields: Any) -> Any:
    response = server.post(
        "/v1/responses", {"model": MODEL, "input": input, "max_output_tokens": 8, **GREEDY, **fields}
    )
    assert response.status_code == 200, response.text
    return response.json()


def events_of(text: str) -> list[dict[str, Any]]:
    """The data of each event; the names in the data must equal those of the event lines."""
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def stream(server: FakeServer, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": MODEL, "input": "hello", "max_output_tokens": 8, "stream": True, **GREEDY, **fields}
    response = server.post("/v1/responses", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


def error_of(server: FakeServer, **fields: Any) -> dict[str, Any]:
    response = server.post("/v1/responses", {"model": MODEL, "input": "hello", **fields})
    assert response.status_code == 400
    error: dict[str, Any] = response.json()["error"]
    return error


def test_an_answer_is_one_message_of_one_text(server: FakeServer):
    prompt = prompt_of(("user", "hello"))
    answer = respond(server, metadata={"a": "b"})
    assert (answer["object"], answer["model"], answer["metadata"]) == ("response", MODEL, {"a": "b"})
    [item] = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert item["content"] == [{"type": "output_text", "text": truth(prompt, 8), "annotations": [], "logprobs": []}]
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (len(prompt), 8)
    assert usage["total_tokens"] == len(prompt) + 8
    assert (answer["id"][:5], item["id"][:4]) == ("resp_", "msg_")


def test_an_answer_that_ends_by_itself_is_completed(server: FakeServer):
    answer = respond(server, max_output_tokens=500, ignore_eos=False)
    assert (answer["status"], answer["incomplete_details"], answer["error"]) == ("completed", None, None)
    assert answer["output"][0]["status"] == "completed"


def test_cached_tokens_are_told(server: FakeServer):
    text = "the same long beginning, twice " * 4
    assert respond(server, text)["usage"]["input_tokens_details"]["cached_tokens"] < 16, "the mark of a message"
    assert respond(server, text)["usage"]["input_tokens_details"]["cached_tokens"] >= 96


def test_instructions_and_input_items_become_the_conversation(server: FakeServer):
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes?"}]},
        {"role": "user", "content": "name a colour"},
    ]
    said = (("user", "hi"), ("assistant", "yes?"), ("user", "name a colour"))
    answer = respond(server, items)
    assert answer["output"][0]["content"][0]["text"] == truth(prompt_of(("system", "Be brief."), *said), 8)
    answer = respond(server, items, instructions="Rhyme.")
    assert answer["instructions"] == "Rhyme."
    assert answer["output"][0]["content"][0]["text"] == truth(
        prompt_of(("system", "Rhyme."), ("system", "Be brief."), *said), 8
    )


def test_the_output_can_be_sent_back_as_input(server: FakeServer):
    first = respond(server)
    asked = [{"role": "user", "content": "hello"}, *first["output"], {"role": "user", "content": "go on"}]
    text = first["output"][0]["content"][0]["text"]
    conversation = prompt_of(("user", "hello"), ("assistant", text), ("user", "go on"))
    assert respond(server, asked)["output"][0]["content"][0]["text"] == truth(conversation, 8)


def test_events_come_in_openais_order_and_build_the_response(server: FakeServer):
    events = stream(server)
    kinds = [event["type"] for event in events]
    assert list(dict.fromkeys(kinds)) == [*TEXT_EVENTS, "response.incomplete"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (events[0]["response"]["status"], events[0]["response"]["output"]) == ("in_progress", [])
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == truth(prompt_of(("user", "hello")), 8)
    final = events[-1]["response"]
    assert final["output"][0]["content"][0]["text"] == text
    items = [event["item"]["id"] for event in events if "item" in event]
    parts = [event["item_id"] for event in events if "item_id" in event]
    assert set(items) == set(parts) == {final["output"][0]["id"]}
    whole = respond(server)
    for answer in (whole, final):
        del answer["id"], answer["created_at"], answer["output"][0]["id"]
        del answer["usage"]["input_tokens_details"]  # the second time the prompt is in the prefix cache
    assert whole == final
    assert [event["type"] for event in stream(server, max_output_tokens=500, ignore_eos=False)][-1] == (
        "response.completed"
    )


def test_log_probabilities_come_where_they_are_included(server: FakeServer):
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 3}
    [part] = respond(server, **fields)["output"][0]["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
    assert [len(entry["top_logprobs"]) for entry in part["logprobs"]] == [2, 2, 2]
    events = stream(server, **fields)
    streamed = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]
    assert streamed == part["logprobs"]


def test_a_schema_is_followed(server: FakeServer):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    schema["additionalProperties"] = False
    format = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    fields = {"text": {"format": format}, "temperature": 1, "max_output_tokens": 200, "ignore_eos": False}
    answer = respond(server, **fields, seed=4)
    assert answer["text"] == {"format": format}
    assert set(json.loads(answer["output"][0]["content"][0]["text"])) == {"n"}
    answer = respond(server, **{**fields, "text": {"format": {"type": "json_object"}}}, seed=4)
    assert answer["output"][0]["content"][0]["text"].startswith("{")


def test_store_has_no_effect_and_says_so(server: FakeServer):
    assert respond(server, store=True)["store"] is False
    assert respond(server, store=False, user="u", prompt_cache_key="k", safety_identifier="s")["store"] is False


def test_effort_reaches_the_template(monkeypatch: pytest.MonkeyPatch):
    def render(self: Any, messages: Any, **values: Any) -> str:
        return f"effort {values.get('reasoning_effort')}"

    monkeypatch.setattr(ByteTokenizer, "apply_chat_template", render)
    with fake_server() as server:
        answer = respond(server, reasoning={"effort": "high", "summary": "auto"})
    assert answer["output"][0]["content"][0]["text"] == truth("effort high", 8)
    assert answer["reasoning"] == {"effort": "high", "summary": None}


def test_what_asks_for_less_than_this_server_does_is_told_back(server: FakeServer):
    answer = respond(server, max_tool_calls=3, service_tier="flex", truncation="auto")
    told = [answer[name] for name in ("max_tool_calls", "service_tier", "truncation")]
    assert told == [3, "default", "auto"]  # there is only one tier


def test_verbosity_reaches_the_template(monkeypatch: pytest.MonkeyPatch):
    def render(tokenizer: ByteTokenizer, messages: Any, **values: Any) -> str:
        return f"verbosity {values.get('verbosity')}"

    monkeypatch.setattr(ByteTokenizer, "apply_chat_template", render)
    with fake_server() as server:
        answer = respond(server, text={"verbosity": "low", "format": {"type": "text"}})
    assert answer["output"][0]["content"][0]["text"] == truth("verbosity low", 8)
    assert answer["text"] == {"format": {"type": "text"}, "verbosity": "low"}


def test_an_input_that_is_too_long_loses_its_oldest_items_when_it_may(server: FakeServer):
    old = [{"role": ("user", "assistant")[i % 2], "content": f"message {i} " * 30} for i in range(10)]
    items = [*old, {"role": "user", "content": "hello"}]
    assert error_of(server, input=items)["param"] == "input"
    answer = respond(server, items, truncation="auto", instructions="Be brief.")
    for first in range(1, 11):
        said = [(item["role"], item["content"]) for item in items[first:]]
        prompt = prompt_of(("system", "Be brief."), *said)
        if len(prompt) <= 2048 - 8:
            break
    assert 1 < first < 10
    assert answer["usage"]["input_tokens"] == len(prompt)
    assert answer["output"][0]["content"][0]["text"] == truth(prompt, 8)
    assert error_of(server, input="x" * 3000, truncation="auto")["param"] == "input"
    roomy = respond(server, items, truncation="auto", max_output_tokens=1500)
    assert roomy["usage"]["output_tokens"] > 900


def test_a_call_goes_with_its_result_or_not_at_all(server: FakeServer):
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": json.dumps({"at": "a" * 500})}
    result = {"type": "function_call_output", "call_id": "c", "output": "r" * 1500}
    items = [{"role": "user", "content": "hi"}, call, result, {"role": "user", "content": "hello" * 50}]
    answer = respond(server, items, truncation="auto")
    assert answer["usage"]["input_tokens"] == len(prompt_of(("user", "hello" * 50))), "there is room for the result"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"background": True}, "background"),
        ({"truncation": "middle"}, "truncation"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"text": {"verbosity": "none"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "strange"}}}}, "text.format.schema"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": [{"content": "hi"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**30}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
    ],
)
def test_bad_input_and_what_is_not_there_is_named(server: FakeServer, fields: dict[str, Any], param: str):
    error = error_of(server, **fields)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_an_error_before_the_first_event_has_a_status():
    with fake_server(options=WireOptions(validates_model=True)) as server:
        response = server.post("/v1/responses", {"model": "other", "input": "a", "stream": True})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        response = server.post("/v1/responses", {"model": MODEL, "input": "x" * 3000, "stream": True})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "input")


def test_a_model_that_fails_in_the_middle_is_a_failed_response(monkeypatch: pytest.MonkeyPatch):
    run, steps = FakeRunner.run, []

    def failing(runner: FakeRunner, batch: Any) -> Any:
        steps.append(batch)
        if len(steps) == 5:
            raise RuntimeError("a kernel broke")
        return run(runner, batch)

    monkeypatch.setattr(FakeRunner, "run", failing)
    with fake_server() as server:
        events = stream(server)
    assert [event["type"] for event in events][:3] == TEXT_EVENTS[:3]
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_an_item_cannot_be_named_where_nothing_is_kept(server: FakeServer):
    error = server.post("/v1/responses", {"input": [{"type": "item_reference", "id": "msg_1"}]}).json()["error"]
    assert error["param"] == "input[0].id"
    assert "'msg_1'" in error["message"]
    assert "store: false" in error["message"]


def test_the_tokens_of_an_input_are_counted(server: FakeServer):
    body = {"input": "hello", "instructions": "Be brief."}
    told = server.post("/v1/responses/input_tokens", body).json()
    num_tokens = server.post("/v1/responses", {**body, "max_output_tokens": 1}).json()["usage"]["input_tokens"]
    assert told == {"object": "response.input_tokens", "input_tokens": num_tokens}


def test_compacting_is_refused_by_name(server: FakeServer):
    refused = server.post("/v1/responses/compact", {"input": "hello"})
    assert (refused.status_code, "compact is not here" in refused.text) == (404, True)


def test_includes_of_tools_that_run_elsewhere_have_no_effect(server: FakeServer):
    include = ["web_search_call.action.sources", "file_search_call.results", "code_interpreter_call.outputs"]
    assert (
        server.post("/v1/responses", {"input": "hello", "max_output_tokens": 1, "include": include}).status_code == 200
    )
    assert (
        server.post("/v1/responses", {"input": "hello", "max_output_tokens": 1, "top_logprobs": 0}).status_code == 200
    )
