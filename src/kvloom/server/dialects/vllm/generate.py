"""The dialect of vLLM 0.2.6's demo server: POST /generate with `prompt`, answers framed by NUL bytes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec

from kvloom.contract.errors import BadRequest, ServingError
from kvloom.contract.request import Delta
from kvloom.contract.sampling import OFF, SamplingParams
from kvloom.server.dialects.constraints import Constraints
from kvloom.server.dialects.parameters import Parameters, prompt_of
from kvloom.server.dialects.sampling import Named
from kvloom.server.errors import tgi_error
from kvloom.server.http.body import decode_body
from kvloom.server.http.job import Folding, Job
from kvloom.server.http.reply import HttpRequest, Reply
from kvloom.server.serving.beam_answers import MAX_WIDTH
from kvloom.server.serving.beams import Beams
from kvloom.server.serving.generation import Generation, best_choices
from kvloom.server.serving.registry import Models

DEFAULT_MAX_TOKENS = 16
MAX_STOPS = 16
MAX_PENALTY = 10


class PromptBody(Constraints, kw_only=True, forbid_unknown_fields=True):
    """vLLM 0.2.6's SamplingParams beside `prompt` and `stream`; an unknown key is an error there too."""

    honoured = frozenset({"use_beam_search", "early_stopping", "length_penalty"})

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
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    use_beam_search: bool | None = None
    early_stopping: bool | Literal["never"] | None = None  # these two of a beam search only
    length_penalty: float | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    model: str | None = None

    def beams(self) -> Beams | None:
        """The beam search; None = answers are sampled. Raises BadRequest, as vLLM does, for options that do not go
        together.
        """
        if not self.use_beam_search:
            for name, neutral in (("early_stopping", False), ("length_penalty", 1.0)):
                if getattr(self, name) not in (None, neutral):
                    raise BadRequest(name, "needs use_beam_search: true")
            return None
        for name, values in _OF_BEAMS.items():
            if getattr(self, name) not in values:
                raise BadRequest(name, f"must be {values[-1]:g} when using beam search")
        width = self.best_of or self.n or 1
        if not 1 < width <= MAX_WIDTH:
            raise BadRequest("best_of", f"must be between 2 and {MAX_WIDTH} when using beam search, got {width}")
        if self.answer_grammar():
            raise BadRequest("use_beam_search", "does not go with what the answer must match")
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        if not -MAX_PENALTY <= penalty <= MAX_PENALTY:
            raise BadRequest("length_penalty", f"must be between -{MAX_PENALTY} and {MAX_PENALTY}, got {penalty:g}")
        return Beams(width, penalty, self.early_stopping or False)

    def sampling(self, max_tokens: int) -> SamplingParams:
        """Raises BadRequest naming the field."""
        top_k = -1 if self.top_k is None else self.top_k
        if top_k < -1 or top_k == 0:
            raise BadRequest("top_k", f"must be -1 (all) or at least 1, got {top_k}")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MAX_STOPS:
            raise BadRequest("stop", f"has more than {MAX_STOPS} entries")
        return _NAMED.params(
            self, top_k=max(0, top_k), max_tokens=max_tokens, stop=tuple(stop), grammar=self.answer_grammar()
        )


_NAMED = Named(PromptBody)
# permitted values with a beam search, which uses the model's own probabilities
_OF_BEAMS: dict[str, tuple[Any, ...]] = {
    **{name: (None, OFF[name]) for name in _NAMED.of_kinds(("shapes", "cuts"))},
    "temperature": (0,),
    "top_k": (None, -1),
}
_decoder = msgspec.json.Decoder(PromptBody)
_encode = msgspec.json.Encoder().encode


class Vllm:
    """Serves the model that `model` names, the default one without it."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def parse(self, request: HttpRequest) -> Job:
        """POST /generate. Raises BadRequest, NotFound."""
        body = decode_body(_decoder, request.body)
        service = self._models.default if body.model is None else self._models.choose(body.model)
        ids = prompt_of(service, body.prompt, self._models.options.max_input_chars, Parameters(), "prompt")
        wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if not 0 < wanted <= service.max_output_tokens:
            raise BadRequest("max_tokens", f"must be between 1 and {service.max_output_tokens}, got {wanted}")
        n = 1 if body.n is None else body.n
        best_of = n if body.best_of is None else body.best_of
        if n < 1 or best_of < n:
            raise BadRequest("best_of" if n >= 1 else "n", f"must be at least {max(1, n)}")
        generation = Generation(
            request.headers["x-request-id"], (ids,), body.sampling(wanted), n, best_of, tenant=request.tenant
        )
        beams = body.beams()
        if beams is not None:
            generation = replace(generation, beams=beams, best_of=n)
        service.check(generation, "prompt")
        if body.stream and generation.best_of > n:
            raise BadRequest("best_of", "cannot be above n when streaming")
        writer_of = FullTextWriter if self._models.options.is_full_text else VllmWriter
        return Job(service, generation, writer_of(generation, body.prompt), bool(body.stream), keep_alive=b"")


class VllmWriter(Folding):
    """{"text": [prompt + answer, ...]}, or frames with the texts that tokens add: of one answer a list of one, of n a
    list of n, empty where nothing is new. An answer of no text is one frame too.
    """

    def __init__(self, generation: Generation, prompt: str) -> None:
        """`prompt`: its text."""
        super().__init__(generation)
        self._prompt = prompt

    def add(self, choice: int, delta: Delta) -> bytes:
        if not delta.text and not delta.finish_reason:
            return b""
        texts = [""] * self.generation.n
        texts[choice] = delta.text
        return _frame({"text": texts})

    def error(self, error: ServingError) -> bytes:
        return _frame(tgi_error(error))

    def whole(self) -> Reply:
        return Reply(_encode({"text": self._texts(best_choices(self.generation, self.answers))}))

    def _texts(self, choices: Sequence[int]) -> list[str]:
        return [self._prompt + self.answers[choice].text for choice in choices]


class FullTextWriter(VllmWriter):
    """Each frame has the prompts and all of the answers so far."""

    def add(self, choice: int, delta: Delta) -> bytes:
        self.fold(choice, delta)
        return _frame({"text": self._texts(range(len(self.answers)))})


def _frame(told: dict[str, Any]) -> bytes:
    return _encode(told) + b"\0"
