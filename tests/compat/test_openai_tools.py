"""The official openai client's helpers for tools and structured answers, unmodified."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest
from pydantic import BaseModel, Field

from tests.support.lazily import lazily
from tests.support.servers import MODEL, FakeServer

openai = lazily("openai")

pytestmark = pytest.mark.compat
MESSAGES = [{"role": "user", "content": "hello"}]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Bonn", "Rome"]
    days: int = Field(ge=0, le=9)


@pytest.fixture(scope="module")
def client(server: FakeServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_parse_gives_the_model(client: openai.OpenAI):
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Weather, seed=1)
    parsed = answer.choices[0].message.parsed
    assert parsed is not None
    assert parsed.city in ("Bonn", "Rome")


def test_parse_gives_the_arguments_of_a_tool(client: openai.OpenAI):
    tool = openai.pydantic_function_tool(Weather)
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, tools=[tool], tool_choice="required", parallel_tool_calls=False, seed=2
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None
    [call] = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)


def test_the_stream_helper_accumulates_calls(client: openai.OpenAI):
    tool = openai.pydantic_function_tool(Weather)
    choice = {"type": "function", "function": {"name": "Weather"}}
    kinds = []
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, tools=[tool], tool_choice=choice, seed=4
    ) as stream:
        kinds += [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    [call] = final.choices[0].message.tool_calls or []
    assert call.id.startswith("call_")
    assert isinstance(call.function.parsed_arguments, Weather)


def test_the_stream_helper_parses_a_format(client: openai.OpenAI):
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, response_format=Weather, seed=5) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Weather)


def test_a_conversation_with_calls_goes_on(client: openai.OpenAI):
    tool = openai.pydantic_function_tool(Weather)
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[tool], tool_choice="required", parallel_tool_calls=False, seed=2
    )
    message = answer.choices[0].message
    [call] = message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    messages = [*MESSAGES, message, result]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[tool], tool_choice="none", seed=3)
    assert answer.choices[0].message.content
    assert not answer.choices[0].message.tool_calls
