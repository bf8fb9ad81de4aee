"""instructor, langchain (OpenAI, Ollama), litellm, unmodified; `make compat` has them."""

import contextlib
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.support.servers import MODEL, FakeServer

instructor = pytest.importorskip("instructor", reason="needs openai 2: run by `make compat`")
instructor_core = pytest.importorskip("instructor.core", reason="needs openai 2: run by `make compat`")
langchain = pytest.importorskip("langchain_openai", reason="run by `make compat`")
langchain_ollama = pytest.importorskip("langchain_ollama", reason="run by `make compat`")
litellm = pytest.importorskip("litellm", reason="run by `make compat`")

pytestmark = [pytest.mark.compat, pytest.mark.filterwarnings("ignore")]  # they warn of their own deprecations
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")  # otherwise the mock, which writes random letters, adds fields endlessly
    city: Literal["Bonn", "Rome"]
    days: int = Field(ge=0, le=9)


class Anything(BaseModel):
    """Any JSON object."""


@pytest.mark.parametrize(("mode", "model"), [("JSON", Anything), ("JSON_SCHEMA", Weather), ("TOOLS", Weather)])
def test_instructor(server: FakeServer, mode: str, model: type[BaseModel]):
    client = instructor.from_provider(
        f"openai/{MODEL}", base_url=server.url + "/v1", api_key="none", mode=instructor.Mode[mode]
    )
    for _ in range(30):  # in JSON mode the mock's random object may be cut by max_tokens
        with contextlib.suppress(instructor_core.IncompleteOutputException):
            answer = client.create(response_model=model, messages=MESSAGES, max_tokens=200, max_retries=30)
            break
    assert isinstance(answer, model)


@pytest.fixture
def chat(server: FakeServer) -> Any:
    return langchain.ChatOpenAI(model=MODEL, base_url=server.url + "/v1", api_key="none", temperature=0, max_tokens=300)


def test_langchain_invoke_and_stream_agree(chat: Any):
    assert "".join(chunk.content for chunk in chat.stream("hello")) == chat.invoke("hello").content


def test_langchain_tools_go_round(chat: Any):
    bound = chat.bind_tools([Weather], tool_choice="required", parallel_tool_calls=False)
    answer = bound.invoke("hello")
    [call] = answer.tool_calls
    assert Weather(**call["args"])
    streamed = None
    for chunk in bound.stream("hello"):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert streamed.tool_calls[0]["args"] == call["args"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
    assert chat.invoke(["hello", answer, result]).content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(chat: Any, method: str):
    assert isinstance(chat.with_structured_output(Weather, method=method).invoke("hello"), Weather)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(server: FakeServer, provider: str):
    asked = {
        "model": f"{provider}/{MODEL}", "api_base": server.url + "/v1", "api_key": "none", "messages": MESSAGES,
        "temperature": 0, "max_tokens": 300,
    }  # fmt: skip
    whole = litellm.completion(**asked).choices[0].message.content
    chunks = litellm.completion(stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    tool = {"type": "function", "function": {"name": "Weather", "parameters": Weather.model_json_schema()}}
    choice = {"type": "function", "function": {"name": "Weather"}}
    [call] = litellm.completion(tools=[tool], tool_choice=choice, **asked).choices[0].message.tool_calls
    assert Weather.model_validate_json(call.function.arguments)


@pytest.fixture
def local(server: FakeServer) -> Any:
    return langchain_ollama.ChatOllama(model=MODEL, base_url=server.url, temperature=0, num_predict=300)


def test_langchain_ollama_invoke_and_stream_agree(local: Any):
    answer = local.invoke("hello")
    assert "".join(chunk.content for chunk in local.stream("hello")) == answer.content
    assert answer.usage_metadata["input_tokens"] > 0
    assert local.invoke(["hello", answer, "more"]).content


def test_langchain_ollama_structured_output_and_embeddings(local: Any, server: FakeServer):
    assert isinstance(local.with_structured_output(Weather, method="json_schema").invoke("hello"), Weather)
    embed = langchain_ollama.OllamaEmbeddings(model=MODEL, base_url=server.url)
    assert len(embed.embed_query("hello")) == 8


@pytest.mark.parametrize("provider", ["ollama", "ollama_chat"])
def test_litellm_ollama(server: FakeServer, provider: str):
    asked = {"model": f"{provider}/{MODEL}", "api_base": server.url, "messages": MESSAGES}
    asked |= {"temperature": 0, "max_tokens": 300}
    whole = litellm.completion(**asked).choices[0].message.content
    chunks = litellm.completion(stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
