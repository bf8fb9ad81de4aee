"""One streamed answer of an OpenAI-compatible server, timed at the socket; takes little CPU away from the server."""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

from kvloom.contract.errors import UserError
from kvloom.net.listening import bracketed

WAYS_TO_IDS: tuple[Mapping[str, object], ...] = ({"return_token_ids": True}, {"logprobs": 1})  # vLLM's, llama.cpp's


class BenchError(UserError):
    """Nothing can be measured; the message is for people."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Token(msgspec.Struct):
    id: int | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None  # llama.cpp's


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """The server under test: `url` is the part before /v1."""

    url: str
    model: str
    api_key: str = ""


@dataclass(slots=True)
class Answer:
    """Times of `time.perf_counter` in seconds: when the request was sent, and when each piece of text arrived."""

    started_s: float
    times_s: list[float] = field(default_factory=list)
    num_tokens: int = 0  # as counted by the server; the number of pieces if it does not count
    num_prompt: int = 0  # tokens, as counted by the server
    num_cached: int | None = None  # of these, those that it did not compute; None = it does not say
    token_ids: list[int] = field(default_factory=list)  # of the answer, where they were asked for

    @property
    def ttft_s(self) -> float:
        """Time to the first piece."""
        return self.times_s[0] - self.started_s

    @property
    def tpot_s(self) -> float:
        """Mean time a token after the first."""
        return (self.times_s[-1] - self.times_s[0]) / max(1, self.num_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between consecutive pieces."""
        return [after - before for before, after in zip(self.times_s, self.times_s[1:], strict=False)]


class _Stream(asyncio.Protocol):
    """Parses a response as it arrives; `done` gets None or the error."""

    def __init__(self, request: bytes, answer: Answer) -> None:
        self._request, self._answer = request, answer
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._now_s = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.DecodeError) as error:
            self._end(BenchError(f"the answer is no stream of completions: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(BenchError("the server closed the connection in the middle of an answer"))

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._rest += body
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self._end(BenchError(f"the server answered {status}: {self._rest[:300].decode(errors='replace').strip()}"))
        elif not self._answer.times_s:
            self._end(BenchError("the server's answer has no text"))
        else:
            self._end(None)

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            return
        chunk = msgspec.json.decode(data, type=_Chunk)
        if chunk.error is not None:
            self._end(BenchError(f"the server ended an answer with an error: {bytes(chunk.error)[:300].decode()}"))
        for choice in chunk.choices:
            if choice.text or not choice.finish_reason:
                self._answer.times_s.append(self._now_s)
            self._answer.token_ids += _ids(choice)
        if chunk.usage and chunk.usage.completion_tokens:
            self._count(chunk.usage)

    def _count(self, usage: _Usage) -> None:
        self._answer.num_tokens, self._answer.num_prompt = usage.completion_tokens, usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            self._answer.num_cached = usage.prompt_tokens_details.cached_tokens

    def _end(self, error: BenchError | None) -> None:
        if self.done.done():
            return
        if error:
            self.done.set_exception(error)
        else:
            self._answer.num_tokens = self._answer.num_tokens or len(self._answer.times_s)
            self.done.set_result(None)


def _ids(choice: _Choice) -> list[int]:
    if choice.token_ids:
        return choice.token_ids
    told = (choice.logprobs.content if choice.logprobs else None) or []
    return [token.id for token in told if token.id is not None]


async def complete(
    target: Target, prompt: Sequence[int] | str, num_tokens: int, more: Mapping[str, object] = MappingProxyType({})
) -> Answer:
    """A greedy answer of `num_tokens` tokens, ends of sequence ignored. `more`: other fields of the request. Raises
    BenchError.
    """
    parts = urlsplit(target.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BenchError(f"url: {target.url!r} is no http:// or https:// address")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    body = _body(target, prompt, num_tokens, more)
    request = _request(target, parts.path.rstrip("/"), f"{bracketed(parts.hostname)}:{port}", body)
    answer = Answer(time.perf_counter())
    try:
        transport, stream = await asyncio.get_running_loop().create_connection(
            lambda: _Stream(request, answer), parts.hostname, port, ssl=parts.scheme == "https" or None
        )
    except OSError as error:
        raise BenchError(f"url: {target.url} cannot be reached: {error.strerror or error}") from None
    with contextlib.closing(transport):
        await stream.done
    return answer


async def way_to_ids(target: Target, prompt: Sequence[int]) -> Mapping[str, object]:
    """The fields of a request with which this server names the tokens of an answer. Raises BenchError if none does."""
    for more in WAYS_TO_IDS:
        answer = await complete(target, prompt, 2, more)
        if len(answer.token_ids) == answer.num_tokens:
            return more
    raise BenchError("the server does not name the tokens of an answer (return_token_ids, or ids of logprobs)")


def _body(target: Target, prompt: Sequence[int] | str, num_tokens: int, more: Mapping[str, object]) -> bytes:
    return msgspec.json.encode(
        {
            "model": target.model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
        }
    )


def _request(target: Target, path: str, host: str, body: bytes) -> bytes:
    key = f"Authorization: Bearer {target.api_key}\r\n" if target.api_key else ""
    head = (
        f"POST {path}/v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n{key}"
        f"Accept: text/event-stream\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
