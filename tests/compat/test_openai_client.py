"""The official openai client, unmodified."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pydantic
import pytest

from tests.support.lazily import lazily
from tests.support.retries import waits
from tests.support.servers import MODEL, FakeServer, fake_server

openai = lazily("openai")

pytestmark = pytest.mark.compat
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(server: FakeServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "MindIE Server"
    assert client.models.retrieve(MODEL).max_model_len == 2048  # vLLM's name of the context


def test_chat_and_its_stream_agree(client: openai.OpenAI):
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, **GREEDY)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, **GREEDY)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content


def test_the_stream_helper_accumulates(client: openai.OpenAI):
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, temperature=0) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"


def test_stop_n_and_log_probabilities(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=2, seed=3, max_tokens=6, stop=["zzz"], logprobs=True, top_logprobs=1
    )
    assert len(answer.choices) == 2
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content[0].top_logprobs) == 1


def test_completions_with_texts_ids_echo_and_log_probabilities(client: openai.OpenAI):
    batch = client.completions.create(model=MODEL, prompt=["ab", "cd"], **GREEDY)
    assert [choice.index for choice in batch.choices] == [0, 1]
    ids = client.completions.create(model=MODEL, prompt=[97, 98], **GREEDY)
    assert ids.choices[0].text == batch.choices[0].text
    scored = client.completions.create(model=MODEL, prompt="ab", echo=True, logprobs=1, **GREEDY)
    assert scored.choices[0].logprobs is not None
    assert scored.choices[0].logprobs.tokens is not None
    assert len(scored.choices[0].logprobs.tokens) == 10


def test_embeddings(embedder: FakeServer):
    """By default the client asks for base64."""
    with openai.OpenAI(base_url=embedder.url + "/v1", api_key="none", max_retries=0) as client:
        default = client.embeddings.create(model=MODEL, input=["hello", "hello there"])
        floats = client.embeddings.create(model=MODEL, input=["hello", "hello there"], encoding_format="float")
        assert [item.embedding for item in default.data] == [item.embedding for item in floats.data]
        assert default.usage.total_tokens == 16
        short = client.embeddings.create(model=MODEL, input=list(b"hello"), dimensions=4)
        assert len(short.data[0].embedding) == 4
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model=MODEL, input="a", dimensions=10_000)


def test_responses_and_their_streams_agree(client: openai.OpenAI):
    fields = {"model": MODEL, "input": "hello", "instructions": "Be brief.", "temperature": 0}
    whole = client.responses.create(**fields)
    assert (whole.status, whole.error) == ("completed", None)
    assert whole.output_text
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    deltas = [event for event in client.responses.create(**fields, stream=True) if event.type.endswith("text.delta")]
    assert "".join(event.delta for event in deltas) == whole.output_text
    with client.responses.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert final.output_text == whole.output_text
    again = client.responses.create(
        model=MODEL,
        input=[{"role": "user", "content": "hello"}, *whole.output, {"role": "user", "content": "more"}],
        temperature=0,
    )
    assert again.output_text


class Person(pydantic.BaseModel):
    age: int
    is_tall: bool


TOOL = {
    "type": "function",
    "name": "weather",
    "description": "Of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


def test_responses_call_tools_and_take_their_results(client: openai.OpenAI):
    asked = {"model": MODEL, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    answer = client.responses.create(input="weather?", **asked, extra_body={"seed": 1})
    [call] = answer.output
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"city"}
    with client.responses.stream(input="weather?", **asked, extra_body={"seed": 1}) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert "".join(pieces) == call.arguments == final.output[0].arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    again = client.responses.create(
        model=MODEL,
        max_output_tokens=5,
        input=[{"role": "user", "content": "weather?"}, *answer.output, result],
        tools=[TOOL],
    )
    assert again.output


def test_responses_are_parsed_into_models(client: openai.OpenAI):
    answer = client.responses.parse(model=MODEL, input="who?", text_format=Person, extra_body={"seed": 2})
    assert isinstance(answer.output_parsed, Person)
    with client.responses.stream(model=MODEL, input="who?", text_format=Person, extra_body={"seed": 2}) as stream:
        assert stream.get_final_response().output_parsed == answer.output_parsed


def test_what_responses_lack_is_an_exception_that_names_it(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="nothing is kept") as bad:
        client.responses.create(model=MODEL, input="hello", previous_response_id="resp_1")
    assert bad.value.param == "previous_response_id"


def test_errors_become_the_clients_exceptions(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("gpt-9")
    assert missing.value.code == "model_not_found"


def test_a_prompt_that_is_too_long_has_the_code_that_programs_look_for(client: openai.OpenAI):
    long = [{"role": "user", "content": "x" * 5000}]
    for ask in (
        lambda: client.chat.completions.create(model=MODEL, messages=long),
        lambda: client.responses.create(model=MODEL, input=long),
    ):
        with pytest.raises(openai.BadRequestError, match="maximum context length") as bad:
            ask()
        assert bad.value.code == "context_length_exceeded"


def test_a_server_that_starts_again_is_asked_again_after_the_time_that_it_says(monkeypatch: pytest.MonkeyPatch):
    def ask() -> object:
        return client.chat.completions.create(model=MODEL, messages=MESSAGES, **GREEDY).choices

    with fake_server() as server, openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=2) as client:
        assert waits(client, server, ask, monkeypatch) == [2, 2]


def test_a_full_server_is_a_rate_limit_and_says_when_to_come_again():
    with (
        fake_server(max_queued_tokens=1) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client,
    ):
        server.admission.num_active, server.admission.num_tokens = 1, 1  # as with another request
        once = client.with_options(max_retries=0)
        for ask in (
            lambda: once.chat.completions.create(model=MODEL, messages=MESSAGES),
            lambda: once.responses.create(model=MODEL, input="hello"),
        ):
            with pytest.raises(openai.RateLimitError) as full:
                ask()
            assert (full.value.code, full.value.response.headers["retry-after"]) == ("rate_limit_exceeded", "1")
