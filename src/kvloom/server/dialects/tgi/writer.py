"""Answers of Text Generation Inference 0.9.4 (router/src/lib.rs of that tag): events, one a token, and whole ones."""

from typing import Any

import msgspec

from kvloom.contract.errors import ServingError
from kvloom.contract.request import Delta, TokenLogprob
from kvloom.contract.tokenizer import Tokenizer
from kvloom.server.dialects.parameters import Parameters, finish_name
from kvloom.server.errors import tgi_error
from kvloom.server.http.job import Folding
from kvloom.server.http.reply import Reply
from kvloom.server.http.sse import event
from kvloom.server.observe.timing import Timing
from kvloom.server.serving.generation import Answer, Generation
from kvloom.server.serving.service import GenerationService

_encode = msgspec.json.Encoder().encode


class TgiWriter(Folding):
    """A whole answer may be one of several, the best; a stream has one, and ends with the whole text.

    `inputs` are the text of the prompt; `timing` is the job's.
    """

    is_array = False  # as a whole: in an array of one

    def __init__(
        self, service: GenerationService, generation: Generation, inputs: str, params: Parameters, timing: Timing
    ) -> None:
        super().__init__(generation)
        self._service, self._inputs, self._params, self._timing = service, inputs, params, timing
        self._num_top = params.top_n_tokens or 0
        self._has_details = bool(params.details or params.decoder_input_details)

    @property
    def _before(self) -> str:
        """The text before the generated text."""
        return self._inputs if self._params.return_full_text else ""

    # -- a stream

    def add(self, choice: int, delta: Delta) -> bytes:
        """A request that was stopped ends with an end-of-sequence token that it did not generate."""
        self.fold(choice, delta)
        if not delta.token_ids and not delta.finish_reason:
            return b""
        tokenizer = self._service.tokenizer
        token_id = delta.token_ids[0] if delta.token_ids else tokenizer.eos_id or 0
        logprob = delta.logprobs[0] if delta.logprobs else None
        answer, is_last = self.answers[choice], delta.finish_reason is not None
        told: dict[str, Any] = {
            "token": _token(tokenizer, token_id, delta.text, logprob),
            "generated_text": self._before + answer.text if is_last else None,
            "details": self._last_details(answer) if is_last and self._has_details else None,
        }
        if told["token"]["logprob"] is None:
            told["token"]["logprob"] = 0.0
        if self._num_top and logprob is not None:
            told["top_tokens"] = _top_tokens(tokenizer, logprob)
        return event(_encode(told))

    def error(self, error: ServingError) -> bytes:
        return error_event(error)

    def _last_details(self, answer: Answer) -> dict[str, Any]:
        """The prompt's tokens are there when they were asked for."""
        details = _summary(answer)
        if answer.prompt_logprobs is not None:
            details["prefill"] = _prefill(self._service.tokenizer, answer)
        return details

    # -- whole

    def whole(self) -> Reply:
        best, *others = sorted(self.answers, key=lambda answer: -answer.mean_logprob)
        told: dict[str, Any] = {"generated_text": self._before + best.text}
        if self._has_details:
            told["details"] = self._details(best)
            if others:
                told["details"]["best_of_sequences"] = [
                    {"generated_text": self._before + answer.text, **self._details(answer)} for answer in others
                ]
        return Reply(_encode([told] if self.is_array else told), headers=self._headers(best))

    def _details(self, answer: Answer) -> dict[str, Any]:
        tokenizer = self._service.tokenizer
        parts = zip(answer.token_ids, answer.token_texts, answer.logprobs, strict=True)
        details: dict[str, Any] = {
            **_summary(answer),
            "prefill": _prefill(tokenizer, answer) if self._params.decoder_input_details else [],
            "tokens": [_token(tokenizer, id, text, logprob) for id, text, logprob in parts],
        }
        if self._num_top:
            details["top_tokens"] = [_top_tokens(tokenizer, logprob) for logprob in answer.logprobs]
        return details

    def _headers(self, answer: Answer) -> dict[str, str]:
        """Times in ms, compute time in seconds."""
        queue_s, inference_s = self._timing.queue_s, self._timing.inference_s
        total_s = queue_s + inference_s
        per_token_s = inference_s / max(1, len(answer.token_ids))
        return {
            "x-compute-type": f"1-{self._service.card.engine.device}",
            "x-compute-time": f"{total_s:.3f}",
            "x-compute-characters": str(len(self._inputs)),
            "x-total-time": f"{total_s * 1e3:.0f}",
            "x-validation-time": "0",
            "x-queue-time": f"{queue_s * 1e3:.0f}",
            "x-inference-time": f"{inference_s * 1e3:.0f}",
            "x-time-per-token": f"{per_token_s * 1e3:.0f}",
        }


class ArrayWriter(TgiWriter):
    """For routes whose whole answer is a list of one."""

    is_array = True


def error_event(error: ServingError) -> bytes:
    return event(_encode(tgi_error(error)))


def _summary(answer: Answer) -> dict[str, Any]:
    return {
        "finish_reason": finish_name(answer.finish_reason),
        "generated_tokens": len(answer.token_ids),
        "seed": answer.seed,
    }


def _token(tokenizer: Tokenizer, token_id: int, text: str, logprob: TokenLogprob | None) -> dict[str, Any]:
    is_special = tokenizer.is_special(token_id)
    value = None if logprob is None else logprob.logprob
    return {"id": token_id, "text": text, "logprob": value, "special": is_special}


def _top_tokens(tokenizer: Tokenizer, logprob: TokenLogprob) -> list[dict[str, Any]]:
    return [
        {"id": i, "text": _literal(tokenizer, i), "logprob": value, "special": tokenizer.is_special(i)}
        for i, value in logprob.top
    ]


def _literal(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


def _prefill(tokenizer: Tokenizer, answer: Answer) -> list[dict[str, Any]]:
    """The prompt's tokens; the first has no log-probability."""
    values = answer.prompt_logprobs or (None,) * len(answer.prompt_ids)
    return [
        {"id": i, "text": _literal(tokenizer, i), "logprob": None if value is None else value.logprob}
        for i, value in zip(answer.prompt_ids, values, strict=True)
    ]
