"""The dialect of vLLM 0.2.6's demo server: POST /generate with `prompt`, answers framed by NUL bytes."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from kvloom.engine.errors import BadRequest, ServingError
from kvloom.engine.request import SamplingParams
from kvloom.server.api.parameters import prompt_of
from kvloom.server.body import decode_body
from kvloom.server.errors import tgi_error
from kvloom.server.generation import Generation, GenerationService
from kvloom.server.models import Models
from kvloom.server.reply import Call, Events, Reply
from kvloom.server.sse import MEDIA_TYPE

DEFAULT_MAX_TOKENS = 16
MAX_STOPS = 16
# what these may be: the values that switch them off
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "use_beam_search": (None, False),
    "early_stopping": (None, False),
    "length_penalty": (None, 1.0),
    "logits_processors": (None, []),
    "spaces_between_special_tokens": (None, True),
}


class PromptBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM 0.2.6's SamplingParams beside `prompt` and `stream`; an unknown key is an error there too."""

    prompt: str
    stream: bool | None = False
    n: int | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    use_beam_search: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logits_processors: list[Any] | None = None
    model: str | None = None

    def sampling(self, max_tokens: int) -> SamplingParams:
        """Raises BadRequest naming the field."""
        for name, neutral in _NEUTRAL.items():
            if getattr(self, name) not in neutral:
                raise BadRequest(name, "is not supported")
        top_k = -1 if self.top_k is None else self.top_k
        if top_k < -1 or top_k == 0:
            raise BadRequest("top_k", f"must be -1 (all) or at least 1, got {top_k}")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MAX_STOPS:
            raise BadRequest("stop", f"has more than {MAX_STOPS} entries")
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(0, top_k),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            max_tokens=max_tokens,
            stop=tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop=bool(self.include_stop_str_in_output),
            ignore_eos=bool(self.ignore_eos),
            seed=self.seed,
            skip_special_tokens=self.skip_special_tokens is not False,
        )


_decoder = msgspec.json.Decoder(PromptBody)


class Vllm:
    """Serves the model that `model` names, the default one without it."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def generate(self, call: Call) -> Reply:
        """POST /generate: {"text": [prompt + answer, ...]}, or a frame a token."""
        body = decode_body(_decoder, call.body)
        service = self._models.default if body.model is None else self._models.choose(body.model)
        ids = prompt_of(service, body.prompt, self._models.options.max_input_chars, "prompt")
        wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if not 0 < wanted <= service.max_output_tokens:
            raise BadRequest("max_tokens", f"must be between 1 and {service.max_output_tokens}, got {wanted}")
        n = 1 if body.n is None else body.n
        best_of = n if body.best_of is None else body.best_of
        if n < 1 or best_of < n:
            raise BadRequest("best_of" if n >= 1 else "n", f"must be at least {max(1, n)}")
        generation = Generation(
            call.headers["x-request-id"], (ids,), body.sampling(wanted), n, best_of, tenant=call.tenant
        )
        service.check(generation, "prompt")
        if body.stream:
            if best_of > n:
                raise BadRequest("best_of", "cannot be above n when streaming")
            frames = self._frames(service, generation, body.prompt)
            return Reply(media_type=MEDIA_TYPE, events=await Events.begin(frames, _error_frame))
        answers = await service.collect(generation)
        return Reply(msgspec.json.encode({"text": [body.prompt + answer.text for answer in answers]}))

    async def _frames(self, service: GenerationService, generation: Generation, prompt: str) -> AsyncGenerator[bytes]:
        """The texts that tokens add; of one answer a list of one, of n a list of n, empty where nothing is new."""
        whole = [prompt] * generation.n
        async with aclosing(service.stream(generation)) as deltas:
            async for choice, delta in deltas:
                if self._models.options.is_full_text:
                    whole[choice] += delta.text
                    yield _frame(whole)
                elif delta.text:
                    texts = [""] * generation.n
                    texts[choice] = delta.text
                    yield _frame(texts)


def _frame(texts: list[str]) -> bytes:
    return msgspec.json.encode({"text": texts}) + b"\0"


def _error_frame(error: ServingError) -> bytes:
    return msgspec.json.encode(tgi_error(error)) + b"\0"
