"""The official ollama client, unmodified."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pydantic
import pytest

from tests.support.lazily import lazily
from tests.support.models.templates import HERMES, R1, TemplateTokenizer
from tests.support.servers import MODEL, FakeServer, fake_server

ollama = lazily("ollama")

pytestmark = pytest.mark.compat
HELLO = [{"role": "user", "content": "hello"}]
GREEDY = ollama.Options(temperature=0, num_predict=20)
KEY = "kvl-0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def hermes() -> Iterator[FakeServer]:
    with fake_server(tokenizer=TemplateTokenizer(HERMES), max_seq_len=8192) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: FakeServer) -> Iterator[ollama.Client]:
    with ollama.Client(server.url) as client:
        yield client


def test_a_chat_and_its_stream_agree(client: ollama.Client):
    whole = client.chat(MODEL, HELLO, options=GREEDY)
    assert (whole.done, whole.done_reason, whole.message.role) == (True, "length", "assistant")
    assert whole.eval_count == 20
    parts = list(client.chat(MODEL, HELLO, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert (parts[-1].done, parts[-1].eval_count) == (True, 20)
    more = client.chat(MODEL, [*HELLO, whole.message, {"role": "user", "content": "more"}], options=GREEDY)
    assert more.prompt_eval_count > whole.prompt_eval_count


def test_generate_its_stream_and_its_context(client: ollama.Client):
    whole = client.generate(MODEL, "hello", system="Be brief.", options=GREEDY)
    parts = list(client.generate(MODEL, "hello", system="Be brief.", options=GREEDY, stream=True))
    assert "".join(part.response for part in parts) == whole.response
    assert parts[-1].context == whole.context
    after = client.generate(MODEL, "more", context=whole.context, options=GREEDY)
    assert after.context[: len(whole.context)] == whole.context
    assert client.generate(MODEL, "a b", raw=True, options=GREEDY).context is None
    assert client.generate(MODEL).done_reason == "load"
    assert client.chat(MODEL, keep_alive=0).done_reason == "unload"


def test_log_probabilities(client: ollama.Client):
    answer = client.chat(MODEL, HELLO, options=GREEDY, logprobs=True, top_logprobs=2)
    assert len(answer.logprobs) == 20
    assert len(answer.logprobs[0].top_logprobs) == 2


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    age: int = pydantic.Field(ge=0, le=150)  # bounded, since the mock could write digits without end
    is_tall: bool


def test_formats(client: ollama.Client):
    answer = client.chat(MODEL, HELLO, format=Person.model_json_schema(), options={"num_predict": 300})
    assert Person.model_validate_json(answer.message.content)
    assert client.generate(MODEL, "hello", format="json", options=GREEDY).response.startswith("{")


def weather(city: str, days: int = 1) -> str:
    """Of a city.

    Args:
        city: its name
        days: how many
    """
    return "rain"


def test_tools_take_python_functions(hermes: FakeServer):
    with ollama.Client(hermes.url) as client:
        answer = client.chat(MODEL, HELLO, tools=[weather], options=GREEDY)
        assert '"name": "weather"' in TemplateTokenizer.rendered[-1]
        assert '"description": "its name"' in TemplateTokenizer.rendered[-1]
        call = ollama.Message.ToolCall(
            function=ollama.Message.ToolCall.Function(name="weather", arguments={"city": "Bonn"})
        )
        said = [*HELLO, ollama.Message(role="assistant", tool_calls=[call])]
        said.append({"role": "tool", "tool_name": "weather", "content": weather("Bonn")})
        assert client.chat(MODEL, said, tools=[weather], options=GREEDY).message.role == answer.message.role
        assert '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}' in TemplateTokenizer.rendered[-1]


def test_a_call_reaches_the_client_as_an_object(hermes: FakeServer):
    """With a format the answer either matches it or is a call, so that the mock calls with some seeds."""
    with ollama.Client(hermes.url) as client:
        calls = []
        for seed in range(12):
            asked = {"options": {"seed": seed, "num_predict": 400, "temperature": 1, "top_k": 0, "top_p": 1}}
            asked |= {"tools": [weather], "format": {"enum": ["yes"]}}
            whole = client.chat(MODEL, HELLO, **asked).message
            parts = [part.message for part in client.chat(MODEL, HELLO, stream=True, **asked)]
            streamed = [call for part in parts for call in part.tool_calls or ()]
            assert streamed == list(whole.tool_calls or ())
            assert whole.content == "".join(part.content for part in parts)
            assert (whole.content == '"yes"') == (not streamed)
            calls += streamed
        assert {call.function.name for call in calls} == {"weather"}
        assert all(isinstance(call.function.arguments, dict) for call in calls)


def test_thinking():
    with fake_server(tokenizer=TemplateTokenizer(R1), has_eos=False) as server, ollama.Client(server.url) as client:
        answer = client.chat(MODEL, HELLO, think=True, options=GREEDY)
        assert answer.message.thinking
        parts = client.generate(MODEL, "hello", think="high", options=GREEDY, stream=True)
        assert "".join(part.thinking or "" for part in parts)


def test_embeddings(embedder: FakeServer):
    with ollama.Client(embedder.url) as client:
        answer = client.embed(MODEL, ["hi", "there"], dimensions=4)
        assert [len(vector) for vector in answer.embeddings] == [4, 4]
        assert len(client.embeddings(MODEL, "hi").embedding) == embedder.engine.info.hidden_size


def test_models_are_listed_shown_and_loaded(client: ollama.Client):
    [listed] = client.list().models
    [loaded] = client.ps().models
    assert (listed.model, loaded.name) == (f"{MODEL}:latest",) * 2
    assert loaded.context_length == 2048
    shown = client.show(listed.model)
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo["general.basename"] == MODEL


def test_what_is_not_here_is_the_clients_exception(client: ollama.Client):
    for ask in (client.pull, client.push, client.delete, lambda name: client.copy(name, "b"), client.create):
        with pytest.raises(ollama.ResponseError, match="not supported") as caught:
            ask(MODEL)
        assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match=r"images\[0\]: the model .* takes no images"):
        client.generate(MODEL, "a", images=[b"aa"])
    with pytest.raises(ollama.ResponseError, match=r"not found") as caught:
        client.show("other")
    assert caught.value.status_code == 404


def test_the_asynchronous_client_and_its_key():
    async def ask(url: str) -> None:
        async with ollama.AsyncClient(url, headers={"Authorization": f"Bearer {KEY}"}) as client:
            whole = await client.chat(MODEL, HELLO, options=GREEDY)
            parts = [part async for part in await client.chat(MODEL, HELLO, options=GREEDY, stream=True)]
            assert "".join(part.message.content for part in parts) == whole.message.content
            generated = await client.generate(MODEL, "hello", options=GREEDY)
            assert generated.response == whole.message.content
            assert (await client.list()).models[0].model == f"{MODEL}:latest"
            assert (await client.ps()).models[0].model == f"{MODEL}:latest"
            assert (await client.show(MODEL)).template == ""
        async with ollama.AsyncClient(url) as stranger:
            with pytest.raises(ollama.ResponseError, match="API key"):
                await stranger.list()

    with fake_server(keys=[KEY]) as server:
        asyncio.run(ask(server.url))
