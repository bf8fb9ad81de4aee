"""text-generation and huggingface_hub.InferenceClient, unmodified."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.support.lazily import lazily
from tests.support.servers import MODEL, OVER_VLLM, FakeServer, fake_server

huggingface_hub, text_generation = lazily("huggingface_hub"), lazily("text_generation")
pytestmark = [
    pytest.mark.compat,
    pytest.mark.filterwarnings("ignore:The `dict` method is deprecated"),  # text-generation itself calls it
]
PROMPT = "My name is Olivier and I"
MESSAGES = [{"role": "user", "content": "hello"}]
SAMPLED = {"max_new_tokens": 12, "do_sample": True, "seed": 7, "temperature": 0.5, "top_k": 10, "top_p": 0.9}


@pytest.fixture(scope="module")
def tgi(server: FakeServer) -> "text_generation.Client":
    return text_generation.Client(server.url)


@pytest.fixture(scope="module")
def hub(server: FakeServer) -> Iterator["huggingface_hub.InferenceClient"]:
    with huggingface_hub.InferenceClient(base_url=server.url) as client:
        yield client


def test_text_generation_and_its_stream_agree(tgi: "text_generation.Client"):
    whole = tgi.generate(PROMPT, decoder_input_details=True, **SAMPLED)
    details = whole.details
    assert details is not None
    assert (details.seed, len(details.tokens)) == (7, details.generated_tokens)
    assert "".join(token.text for token in details.prefill) == PROMPT
    assert details.prefill[0].logprob is None
    assert "".join(token.text for token in details.tokens) == whole.generated_text
    events = list(tgi.generate_stream(PROMPT, **SAMPLED))
    assert "".join(event.token.text for event in events) == whole.generated_text
    assert [event.token for event in events] == details.tokens
    assert events[-1].generated_text == whole.generated_text
    assert events[-1].details is not None
    assert events[-1].details.finish_reason == details.finish_reason
    assert all(event.generated_text is None for event in events[:-1])


def test_text_generation_options(tgi: "text_generation.Client"):
    more = {} if OVER_VLLM else {"watermark": True, "typical_p": 0.9}  # vLLM supports neither
    full = tgi.generate(PROMPT, max_new_tokens=4, return_full_text=True, truncate=5, **more)
    assert full.generated_text.startswith(PROMPT)
    best = tgi.generate(PROMPT, max_new_tokens=4, best_of=3, do_sample=True)
    assert best.details is not None
    assert len(best.details.best_of_sequences) == 2
    end = tgi.generate(PROMPT, max_new_tokens=6).generated_text[4:]
    stopped = tgi.generate(PROMPT, max_new_tokens=200, stop_sequences=[end])
    assert stopped.generated_text.endswith(end)
    assert stopped.details is not None
    assert stopped.details.finish_reason == "stop_sequence"


def test_text_generation_async(server: FakeServer, tgi: "text_generation.Client"):
    async def ask() -> tuple[str, str]:
        client = text_generation.AsyncClient(server.url)
        whole = await client.generate(PROMPT, **SAMPLED)
        text = "".join([event.token.text async for event in client.generate_stream(PROMPT, **SAMPLED)])
        return whole.generated_text, text

    whole, streamed = asyncio.run(ask())
    assert whole == streamed == tgi.generate(PROMPT, **SAMPLED).generated_text


def test_text_generation_chats():
    """It always names the model "tgi". (Its chat stream expects `tool_calls` in every delta, beyond the protocol.)"""
    with fake_server() as server:
        answer = text_generation.Client(server.url).chat(messages=MESSAGES, max_tokens=8, seed=1)
        expected = server.chat("hello", max_tokens=8, seed=1).json()
        assert answer.choices[0].message.content == expected["choices"][0]["message"]["content"]
        assert answer.usage["completion_tokens"] == expected["usage"]["completion_tokens"]


def test_text_generation_raises_its_own_errors(tgi: "text_generation.Client", server: FakeServer):
    too_many = server.engine.max_seq_len + 1
    with pytest.raises(text_generation.errors.ValidationError, match="`max_new_tokens` must be <= "):
        tgi.generate(PROMPT, max_new_tokens=too_many)
    with pytest.raises(text_generation.errors.ValidationError, match="`max_new_tokens` must be <= "):
        list(tgi.generate_stream(PROMPT, max_new_tokens=too_many))


def test_the_hub_generates_text(hub: "huggingface_hub.InferenceClient"):
    text = hub.text_generation(PROMPT, **SAMPLED)
    answer = hub.text_generation(PROMPT, details=True, decoder_input_details=True, **SAMPLED)
    assert answer.generated_text == text
    assert answer.details is not None
    assert answer.details.seed == 7
    assert "".join(token.text for token in answer.details.prefill) == PROMPT
    assert "".join(hub.text_generation(PROMPT, stream=True, **SAMPLED)) == text
    events = list(hub.text_generation(PROMPT, stream=True, details=True, **SAMPLED))
    assert events[-1].generated_text == text
    assert events[-1].details is not None
    assert events[-1].details.generated_tokens == len(events)


def test_the_hub_chats(hub: "huggingface_hub.InferenceClient"):
    options = {"model": MODEL, "max_tokens": 12, "seed": 7, "temperature": 0.5, "logprobs": True, "top_logprobs": 2}
    answer = hub.chat_completion(MESSAGES, **options)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.logprobs is not None
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    chunks = list(hub.chat_completion(MESSAGES, stream=True, **options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == choice.message.content
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason


def test_the_hub_async_and_its_errors(server: FakeServer, hub: "huggingface_hub.InferenceClient"):
    async def ask() -> str:
        async with huggingface_hub.AsyncInferenceClient(base_url=server.url) as client:
            return "".join([text async for text in await client.text_generation(PROMPT, stream=True, **SAMPLED)])

    assert asyncio.run(ask()) == hub.text_generation(PROMPT, **SAMPLED)
    with pytest.raises(huggingface_hub.errors.ValidationError, match="`temperature` must be strictly positive"):
        hub.text_generation(PROMPT, temperature=0.0)
    with pytest.raises(huggingface_hub.errors.BadRequestError, match="top_logprobs"):
        hub.chat_completion(MESSAGES, model=MODEL, top_logprobs=2)
