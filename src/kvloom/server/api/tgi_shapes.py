"""Request bodies and answer objects of Text Generation Inference 0.9.4 (router/src/lib.rs of that tag)."""

from typing import Any

import msgspec

from kvloom.engine.request import Delta, TokenLogprob
from kvloom.server.api.parameters import Parameters, finish_name
from kvloom.server.generation import Answer, TokenizerLike


class GenerateBody(msgspec.Struct, kw_only=True):
    """/generate and /generate_stream, where `stream` has no effect (the route says it)."""

    inputs: str
    parameters: Parameters | None = None


class RootBody(GenerateBody, kw_only=True):
    """POST /: streams when `stream` says so."""

    stream: bool | None = False


def token(tokenizer: TokenizerLike, token_id: int, text: str, logprob: TokenLogprob | None) -> dict[str, Any]:
    is_special = tokenizer.is_special(token_id)
    value = None if logprob is None else logprob.logprob
    return {"id": token_id, "text": text, "logprob": value, "special": is_special}


def top_tokens(tokenizer: TokenizerLike, logprob: TokenLogprob) -> list[dict[str, Any]]:
    return [
        {"id": i, "text": literal(tokenizer, i), "logprob": value, "special": tokenizer.is_special(i)}
        for i, value in logprob.top
    ]


def literal(tokenizer: TokenizerLike, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


def prefill(
    tokenizer: TokenizerLike, ids: tuple[int, ...], logprobs: tuple[TokenLogprob | None, ...] | None
) -> list[dict[str, Any]]:
    """The prompt's tokens; the first has no log-probability."""
    values = logprobs or (None,) * len(ids)
    return [
        {"id": i, "text": literal(tokenizer, i), "logprob": None if value is None else value.logprob}
        for i, value in zip(ids, values, strict=True)
    ]


def details_of(tokenizer: TokenizerLike, answer: Answer, has_prefill: bool, num_top: int) -> dict[str, Any]:
    tokens = [
        token(tokenizer, i, text, logprob)
        for i, text, logprob in zip(answer.token_ids, answer.token_texts, answer.logprobs, strict=True)
    ]
    details: dict[str, Any] = {
        "finish_reason": finish_name(answer.finish_reason),
        "generated_tokens": len(answer.token_ids),
        "seed": answer.seed,
        "prefill": prefill(tokenizer, answer.prompt_ids, answer.prompt_logprobs) if has_prefill else [],
        "tokens": tokens,
    }
    if num_top:
        details["top_tokens"] = [top_tokens(tokenizer, logprob) for logprob in answer.logprobs]
    return details


class Stream:
    """The events of one TGI stream: one a token, the last with the whole text."""

    def __init__(self, tokenizer: TokenizerLike, before: str, has_details: bool, num_top: int, eos_id: int) -> None:
        self._tokenizer, self._text = tokenizer, before
        self._has_details, self._num_top, self._eos_id = has_details, num_top, eos_id
        self._num_tokens = 0
        self._prefill: list[dict[str, Any]] | None = None

    def set_prefill(self, ids: tuple[int, ...], logprobs: tuple[TokenLogprob | None, ...] | None) -> None:
        self._prefill = prefill(self._tokenizer, ids, logprobs)

    def event(self, delta: Delta) -> dict[str, Any]:
        """A request that was stopped ends with an end-of-sequence token that it did not generate."""
        self._num_tokens += len(delta.token_ids)
        self._text += delta.text
        token_id = delta.token_ids[0] if delta.token_ids else self._eos_id
        logprob = delta.logprobs[0] if delta.logprobs else None
        is_last = delta.finish_reason is not None
        event: dict[str, Any] = {
            "token": token(self._tokenizer, token_id, delta.text, logprob),
            "generated_text": self._text if is_last else None,
            "details": self._details(delta) if is_last and self._has_details else None,
        }
        if event["token"]["logprob"] is None:
            event["token"]["logprob"] = 0.0
        if self._num_top and logprob is not None:
            event["top_tokens"] = top_tokens(self._tokenizer, logprob)
        return event

    def _details(self, delta: Delta) -> dict[str, Any]:
        details: dict[str, Any] = {
            "finish_reason": finish_name(delta.finish_reason),
            "generated_tokens": self._num_tokens,
            "seed": delta.seed,
        }
        if self._prefill is not None:
            details["prefill"] = self._prefill
        return details
