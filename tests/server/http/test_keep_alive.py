"""Silent streams send keep-alives that no client takes for text; a dead rank is only a pause."""

import json
import threading
from collections.abc import Iterator

import httpx
import pytest

from kvloom.server.http import sse
from tests.support.lazily import lazily
from tests.support.servers import MODEL, FakeServer, fake_server

anthropic, openai, text_generation = (lazily(name) for name in ("anthropic", "openai", "text_generation"))

NUM_TOKENS = 4
PROMPT = [{"role": "user", "content": "hi"}]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """A server whose every step takes several keep-alive intervals."""
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.005)
    with fake_server(step_s=0.05, has_eos=False) as running:
        yield running


STREAMS = {
    "/v1/chat/completions": {"model": MODEL, "messages": PROMPT, "max_tokens": NUM_TOKENS},
    "/v1/completions": {"model": MODEL, "prompt": "hi", "max_tokens": NUM_TOKENS, "n": 2, "seed": 1},
    "/v1/responses": {"model": MODEL, "input": "hi", "max_output_tokens": 16},
    "/v1/messages": {"model": MODEL, "messages": PROMPT, "max_tokens": NUM_TOKENS},
    "/generate_stream": {"inputs": "hi", "parameters": {"max_new_tokens": NUM_TOKENS}},
    f"/v2/models/{MODEL}/generate_stream": {"text_input": "hi", "parameters": {"max_new_tokens": NUM_TOKENS}},
}
SILENT = {
    "/api/chat": {"model": MODEL, "messages": PROMPT, "options": {"num_predict": NUM_TOKENS}},
    "/generate": {"prompt": "hi", "max_tokens": NUM_TOKENS},
}


def streamed(server: FakeServer, path: str, body: dict[str, object]) -> str:
    return server.post(path, {**body, "stream": True} if "_stream" not in path else body).text


@pytest.mark.parametrize("path", STREAMS)
def test_a_silent_stream_of_events_says_comments_between_whole_events(slow: FakeServer, path: str):
    text = streamed(slow, path, STREAMS[path])
    events = text.split("\n\n")
    assert not events[0].startswith(":"), "the first frame comes with the first token"
    assert events.count(": keep-alive") >= NUM_TOKENS - 1
    for event in events:
        lines = event.split("\n")
        assert event in ("", ": keep-alive") or all(line.startswith(("data:", "event:", "id:")) for line in lines)


@pytest.mark.parametrize("path", SILENT)
def test_other_streams_say_nothing_in_between(slow: FakeServer, path: str):
    text = streamed(slow, path, SILENT[path])
    pieces = [json.loads(piece) for piece in text.replace("\0", "\n").splitlines() if piece]
    assert len(pieces) > 1, "tokens come one by one, with silences between them"


def test_a_whole_answer_says_nothing_before_it_is_there(slow: FakeServer):
    reply = slow.chat(max_tokens=NUM_TOKENS)
    assert reply.json()["usage"]["completion_tokens"] == NUM_TOKENS


@pytest.mark.filterwarnings("ignore:The `dict` method is deprecated")  # by pydantic, in text-generation itself
def test_official_clients_take_no_comment_for_text(slow: FakeServer):
    want = slow.chat(max_tokens=NUM_TOKENS, temperature=0).json()["choices"][0]["message"]["content"]
    with openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none") as client:
        chunks = client.chat.completions.create(
            model=MODEL, messages=PROMPT, max_tokens=NUM_TOKENS, temperature=0, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == want
    with (
        anthropic.Anthropic(base_url=slow.url, api_key="none") as other,
        other.messages.stream(
            model=MODEL, messages=PROMPT, max_tokens=NUM_TOKENS, extra_body={"temperature": 0}
        ) as stream,
    ):
        assert "".join(stream.text_stream) == want
    asked = {"inputs": "hi", "parameters": {"max_new_tokens": NUM_TOKENS}}
    tokens = text_generation.Client(slow.url).generate_stream("hi", max_new_tokens=NUM_TOKENS)
    assert "".join(token.token.text for token in tokens) == slow.post("/generate", asked).json()["generated_text"]


def test_a_dead_rank_is_a_pause_for_whoever_reads_over_http():
    with fake_server(step_s=0.01, has_eos=False) as server:
        body = {"max_tokens": 40, "temperature": 0.9, "seed": 3, "n": 2}
        want = server.complete("a prompt", **body).json()
        found: list[httpx.Response] = []
        reading = threading.Thread(target=lambda: found.append(server.complete("a prompt", **body)))
        reading.start()
        server.executor.dies.set()
        reading.join()
        assert [choice["text"] for choice in found[0].json()["choices"]] == [
            choice["text"] for choice in want["choices"]
        ]
        names = (
            "model_crashes",
            "num_requests_resumed",
            "recomputed_tokens",
            "num_requests_ended_by_crashes",
            "model_restarts",
        )
        page = server.client.get("/metrics").text
        values = {name: float(page.split(f"\n{name}_total{{")[1].split("} ")[1].split("\n")[0]) for name in names}
        assert (values["model_crashes"], values["model_restarts"], values["num_requests_ended_by_crashes"]) == (1, 1, 0)
