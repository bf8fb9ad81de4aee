"""The official anthropic client, unmodified."""

from __future__ import annotations

from collections.abc import Iterator

import pydantic
import pytest

from tests.support.lazily import lazily
from tests.support.retries import waits
from tests.support.servers import MODEL, FakeServer, fake_server

anthropic = lazily("anthropic")

pytestmark = pytest.mark.compat
FIELDS = {"model": MODEL, "max_tokens": 300, "messages": [{"role": "user", "content": "hello"}]}
GREEDY = {"extra_body": {"temperature": 0}}  # this client sends no temperature by default
KEY = "kvl-0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def keyed() -> Iterator[FakeServer]:
    with fake_server(keys=[KEY]) as running:
        yield running


@pytest.fixture(scope="module")
def client(keyed: FakeServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=keyed.url, api_key=KEY, max_retries=0) as client:
        yield client


def test_a_message_and_its_stream_agree(client: anthropic.Anthropic):
    whole = client.messages.create(**FIELDS, **GREEDY, system="Be brief.")
    assert (whole.type, whole.stop_reason) == ("message", "end_turn")
    [block] = whole.content
    assert block.type == "text"
    events = list(client.messages.create(**FIELDS, **GREEDY, system="Be brief.", stream=True))
    assert (events[0].type, events[-1].type) == ("message_start", "message_stop")
    with client.messages.stream(**FIELDS, **GREEDY, system="Be brief.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text
    assert [part.text for part in final.content] == [block.text]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_tokens_are_counted_as_they_are_used(client: anthropic.Anthropic):
    counted = client.messages.count_tokens(model=MODEL, messages=FIELDS["messages"], system="Be brief.")
    usage = client.messages.create(**FIELDS, system="Be brief.").usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_conversation_goes_on(client: anthropic.Anthropic):
    first = client.messages.create(**FIELDS)
    said = [*FIELDS["messages"], {"role": "assistant", "content": first.content}, {"role": "user", "content": "more"}]
    second = client.messages.create(model=MODEL, max_tokens=5, messages=said, stop_sequences=["zzz"])
    assert second.usage.output_tokens <= 5


class Person(pydantic.BaseModel):
    age: int
    is_tall: bool


TOOL = {
    "name": "weather",
    "description": "Of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def test_messages_use_tools_and_take_their_results(client: anthropic.Anthropic):
    choice = {"type": "any", "disable_parallel_tool_use": True}
    answer = client.messages.create(**FIELDS, tools=[TOOL], tool_choice=choice, extra_body={"seed": 1})
    [use] = answer.content
    assert (use.type, answer.stop_reason) == ("tool_use", "tool_use")
    assert set(use.input) == {"city"}
    with client.messages.stream(**FIELDS, tools=[TOOL], tool_choice=choice, extra_body={"seed": 1}) as stream:
        final = stream.get_final_message()
    assert final.content[0].input == use.input
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
    said = [
        *FIELDS["messages"],
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    again = client.messages.create(model=MODEL, max_tokens=5, messages=said, tools=[TOOL])
    assert again.role == "assistant"


@pytest.mark.parametrize("max_tokens", range(1, 40, 3))
def test_a_call_that_is_cut_is_the_same_streamed_and_whole(client: anthropic.Anthropic, max_tokens: int):
    fields = {**FIELDS, "max_tokens": max_tokens, "tools": [TOOL], "extra_body": {"seed": 1}}
    answer = client.messages.create(**fields, tool_choice={"type": "any"})
    with client.messages.stream(**fields, tool_choice={"type": "any"}) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == answer.stop_reason == "max_tokens"
    assert [block.model_dump(exclude={"id"}) for block in final.content] == [
        block.model_dump(exclude={"id"}) for block in answer.content
    ]


def test_messages_are_parsed_into_models(client: anthropic.Anthropic):
    answer = client.messages.parse(**FIELDS, output_format=Person, extra_body={"seed": 2})
    assert isinstance(answer.parsed_output, Person)


def test_errors_become_the_clients_exceptions(client: anthropic.Anthropic):
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**FIELDS, extra_body={"temperature": 9})
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(**FIELDS)


def test_models_are_listed_and_retrieved(client: anthropic.Anthropic):
    [model] = client.models.list()
    assert (model.id, model.type, model.lifecycle) == (MODEL, "model", "active")
    assert (model.max_input_tokens, model.max_tokens) == (2047, 2047)
    assert client.models.retrieve(MODEL) == model
    assert client.models.list(after_id=MODEL).data == []
    assert client.models.list(before_id=MODEL, limit=1).data == []
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.models.retrieve("other")
    with pytest.raises(anthropic.BadRequestError, match="limit"):
        client.models.list(limit=0)


def test_a_prompt_that_is_too_long_says_so_in_anthropics_words(client: anthropic.Anthropic):
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**{**FIELDS, "messages": [{"role": "user", "content": "x" * 5000}]})


def test_a_server_that_starts_again_is_asked_again_after_the_time_that_it_says(monkeypatch: pytest.MonkeyPatch):
    with fake_server() as server, anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=2) as client:
        assert waits(client, server, lambda: client.messages.create(**FIELDS).content, monkeypatch) == [2, 2]
        server.health.is_draining = True
        with pytest.raises(anthropic.InternalServerError) as stopping:
            client.with_options(max_retries=0).messages.create(**FIELDS)
    assert (stopping.value.status_code, stopping.value.type) == (529, "overloaded_error")
    assert type(stopping.value).__name__ == "OverloadedError"


def test_a_full_server_is_overloaded_and_says_when_to_come_again():
    with fake_server(max_queued_tokens=1) as server, anthropic.Anthropic(base_url=server.url, api_key="none") as client:
        server.admission.num_active, server.admission.num_tokens = 1, 1  # as with another request
        with pytest.raises(anthropic.InternalServerError) as full:
            client.with_options(max_retries=0).messages.create(**FIELDS)
        assert (full.value.status_code, full.value.type) == (529, "overloaded_error")
        assert full.value.response.headers["retry-after"] == "1"
        server.admission.num_active = server.admission.num_tokens = 0
        assert client.messages.create(**FIELDS).content
