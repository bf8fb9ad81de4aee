"""An answer that is cut inside a character ends before it: whole or streamed, in every dialect, whatever cuts it.

Every token of this model is the end of a euro sign, a letter, and the beginning of the next euro sign. So the first
bytes are an invalid character, which is shown as such; the last bytes are half a character; all characters between span
two tokens.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvloom.rank.fake import EOS_ID, ByteTokenizer
from tests.support.servers import MODEL, FakeServer, fake_server

PIECE = b"\xaca\xe2\x82"
TEXT = "\ufffda" + "€a" * 3  # of four tokens
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
COMPLETION = {"model": MODEL, "prompt": "hi", "max_tokens": 4, "temperature": 0}
VLLM = {"prompt": "hi", "max_tokens": 4, "temperature": 0}
TGI = {"inputs": "hi", "parameters": {"max_new_tokens": 4}}
RESPONSE = {"model": MODEL, "input": "hi", "max_output_tokens": 4, "temperature": 0}
TRITON = {"text_input": "hi", "parameters": {"max_new_tokens": 4}}
OLLAMA = {"model": MODEL, "options": {"num_predict": 4, "temperature": 0}}
ASKED, TOLD = {"prompt": "hi"}, {"messages": CHAT["messages"]}
STREAM = {"stream": True}
WHOLE = {"stream": False}


class Halves(ByteTokenizer):
    def token_bytes(self, token_id: int) -> bytes:
        return PIECE if token_id < 256 else super().token_bytes(token_id)


@pytest.fixture(scope="module")
def halves() -> Iterator[FakeServer]:
    with fake_server(tokenizer=Halves(), has_eos=False) as server:
        yield server


def events(text: str) -> list[Any]:
    """The JSON documents of a stream, without their framing."""
    found, decoder, at = [], json.JSONDecoder(), 0
    while match := re.compile(r"\{").search(text, at):
        document, at = decoder.raw_decode(text, match.start())
        found.append(document)
    return found


# dialect: request and text of the whole answer, request of the stream and the text that an event adds
DIALECTS: dict[str, tuple[str, Any, Callable[[Any], str], str, Any, Callable[[Any], str]]] = {
    "chat": (
        "/v1/chat/completions", CHAT, lambda a: a["choices"][0]["message"]["content"],
        "/v1/chat/completions", CHAT | STREAM, lambda e: e["choices"][0]["delta"].get("content") or "",
    ),
    "completions": (
        "/v1/completions", COMPLETION, lambda a: a["choices"][0]["text"],
        "/v1/completions", COMPLETION | STREAM, lambda e: e["choices"][0]["text"],
    ),
    "responses": (
        "/v1/responses", RESPONSE, lambda a: a["output"][0]["content"][0]["text"],
        "/v1/responses", RESPONSE | STREAM, lambda e: e.get("delta", "") if "output_text.delta" in e["type"] else "",
    ),
    "messages": (
        "/v1/messages", CHAT, lambda a: a["content"][0]["text"],
        "/v1/messages", CHAT | STREAM, lambda e: e.get("delta", {}).get("text", ""),
    ),
    "tgi": (
        "/generate", TGI, lambda a: a["generated_text"],
        "/generate_stream", TGI, lambda e: e["token"]["text"],
    ),
    "vllm": (
        "/generate", VLLM, lambda a: a["text"][0].removeprefix("hi"),
        "/generate", VLLM | STREAM, lambda e: e["text"][0],
    ),
    "triton": (
        f"/v2/models/{MODEL}/generate", TRITON, lambda a: a["text_output"],
        f"/v2/models/{MODEL}/generate_stream", TRITON, lambda e: e["text_output"],
    ),
    "native": (
        "/infer", TGI, lambda a: a["generated_text"],
        "/infer", TGI | STREAM, lambda e: e["token"]["text"] if e["token"]["text"] else "",
    ),
    "ollama generate": (
        "/api/generate", OLLAMA | ASKED | WHOLE, lambda a: a["response"],
        "/api/generate", OLLAMA | ASKED, lambda e: e.get("response", ""),
    ),
    "ollama chat": (
        "/api/chat", OLLAMA | TOLD | WHOLE, lambda a: a["message"]["content"],
        "/api/chat", OLLAMA | TOLD, lambda e: e.get("message", {}).get("content", ""),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_cut_character_is_dropped_whole_and_streamed(halves: FakeServer, dialect: str):
    path, body, text_of, stream_path, stream_body, piece_of = DIALECTS[dialect]
    answer = halves.post(path, body)
    assert (answer.status_code, text_of(answer.json())) == (200, TEXT)
    stream = halves.post(stream_path, stream_body)
    assert stream.status_code == 200
    pieces = [piece_of(event) for event in events(stream.text)]
    if dialect == "native":  # its last event has the whole text instead of the last piece
        assert events(stream.text)[-1]["generated_text"] == TEXT
        pieces.append("€a")
    assert "".join(pieces) == TEXT


def test_log_probabilities_stay_one_a_token(halves: FakeServer):
    choice = halves.complete("hi", max_tokens=4, temperature=0, logprobs=0).json()["choices"][0]
    assert choice["text"] == TEXT
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"]) == 4
    chat = halves.chat(max_tokens=4, temperature=0, logprobs=True).json()["choices"][0]
    assert [bytes(entry["bytes"]) for entry in chat["logprobs"]["content"]] == [PIECE] * 4
    details = halves.post("/generate", {**TGI, "parameters": {"max_new_tokens": 4, "details": True}}).json()["details"]
    assert "".join(token["text"] for token in details["tokens"]) == TEXT


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "text"), [(["€a€"], "\ufffda"), (["a€b", "zz"], TEXT)])
def test_stops_are_looked_for_in_whole_characters(halves: FakeServer, stop: list[str], text: str, stream: bool):
    """Text that was held back as a possible beginning of a stop string is returned when the answer is cut."""
    response = halves.complete("hi", max_tokens=4, temperature=0, stream=stream, stop=stop)
    assert "".join(event["choices"][0]["text"] for event in events(response.text) if event["choices"]) == text


def test_a_cut_by_the_end_of_the_sequence_drops_it_too():
    class Ending(Halves):
        def token_bytes(self, token_id: int) -> bytes:
            return b"" if token_id == EOS_ID else super().token_bytes(token_id)

    with fake_server(tokenizer=Ending()) as server:
        for prompt in range(400):
            choice = server.complete([prompt % 256, prompt // 256], max_tokens=40, temperature=0).json()["choices"][0]
            assert choice["text"].rstrip("a€") in ("\ufffd", "")
            if choice["finish_reason"] == "stop":
                return
    raise AssertionError("no answer ended by itself")
