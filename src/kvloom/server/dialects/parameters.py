"""The sampling parameters of TGI 0.9.4, which the Triton and native routes share.

Error texts are TGI's, because its clients show them.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec

from kvloom.contract.errors import BadRequest
from kvloom.contract.request import FinishReason
from kvloom.contract.sampling import SamplingParams
from kvloom.server.dialects.constraints import Constraints
from kvloom.server.dialects.sampling import Named
from kvloom.server.errors import PromptTooLong
from kvloom.server.serving.generation import MAX_CHOICES, Generation
from kvloom.server.serving.prompts import encode_text, request_limit
from kvloom.server.serving.service import GenerationService

DEFAULT_NEW_TOKENS = 20
MAX_STOPS = 4
MAX_BEST_OF = 16
MAX_INT = 2**31 - 1
MAX_SEED = 2**64 - 1
assert MAX_BEST_OF <= MAX_CHOICES


class Parameters(Constraints, kw_only=True):
    """All may be null. Unknown ones are ignored, as TGI does, but for those that constrain the answer."""

    best_of: int | None = None
    decoder_input_details: bool | None = None
    details: bool | None = None
    do_sample: bool | None = None
    max_new_tokens: int | None = None
    max_tokens: int | None = None  # its name with Triton's back ends for vLLM and TensorRT-LLM
    repetition_penalty: float | None = None
    return_full_text: bool | None = None
    seed: int | None = None
    stop: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_n_tokens: int | None = None
    top_p: float | None = None
    truncate: int | None = None
    typical_p: float | None = None
    watermark: bool | None = None
    frequency_penalty: float | None = None
    adapter_id: str | None = None  # name of a LoRA adapter, as in later TGI
    batch_size: int | None = None  # of the Triton routes; checked, but the batch is the scheduler's to choose
    priority: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None  # 1 the most urgent; 0 = none

    @property
    def asked_tokens(self) -> int | None:
        """The most tokens that the body asks for."""
        return self.max_tokens if self.max_new_tokens is None else self.max_new_tokens


_NAMED = Named(Parameters)
_CUTS = _NAMED.of_kinds(("cuts",))


@dataclass(frozen=True, slots=True)
class Rules:
    """Where the families of routes differ (spec 3.3.2)."""

    is_top_p_open: bool  # 1.0 is refused, as TGI does
    has_best: bool  # of several answers the best is given
    may_be_off: bool  # top_k 0 means off and temperature 0 greedy; TGI refuses them


TGI = Rules(is_top_p_open=True, has_best=True, may_be_off=False)
NATIVE = Rules(is_top_p_open=True, has_best=False, may_be_off=False)
TRITON = Rules(is_top_p_open=False, has_best=False, may_be_off=True)


def invalid(text: str) -> BadRequest:
    return BadRequest("", f"Input validation error: {text}")


def prompt_of(
    service: GenerationService, text: str, max_chars: int, params: Parameters, name: str = "inputs"
) -> tuple[int, ...]:
    """The prompt's token ids. Raises BadRequest: empty, longer than `max_chars` characters, too many tokens."""
    if not text:
        raise invalid(f"`{name}` cannot be empty")
    if len(text) > max_chars:
        raise invalid(f"`{name}` must have at most {max_chars} characters. Given: {len(text)}")
    limit = service.max_input_tokens if params.truncate is None else request_limit(service)
    try:
        return encode_text(service, text, name, limit)
    except PromptTooLong as error:
        raise _too_long(service, params, error.count, error.num_tokens, name) from None


def _truncated(ids: tuple[int, ...], params: Parameters, limit: int) -> tuple[int, ...]:
    """The last `truncate` tokens. Raises BadRequest outside (0, limit]."""
    if params.truncate is None:
        return ids
    if not 0 < params.truncate <= limit:
        raise invalid(f"`truncate` must be strictly positive and less than {limit}. Given: {params.truncate}")
    return ids[-params.truncate :]


def _new_tokens(service: GenerationService, params: Parameters, num_input: int, name: str = "inputs") -> int:
    """The most tokens to generate. Raises BadRequest when prompt or answer are too long."""
    wanted = DEFAULT_NEW_TOKENS if params.asked_tokens is None else params.asked_tokens
    if num_input > service.max_input_tokens:
        raise _too_long(service, params, str(num_input), num_input, name)
    if wanted <= 0:
        raise invalid("`max_new_tokens` must be strictly positive")
    if wanted > service.max_output_tokens:
        raise invalid(f"`max_new_tokens` must be <= {service.max_output_tokens}. Given: {wanted}")
    total = service.engine.max_seq_len
    if num_input + wanted > total and params.asked_tokens is not None:
        raise _too_long(service, params, str(num_input), num_input, name)
    return min(wanted, total - num_input)


def _too_long(
    service: GenerationService, params: Parameters, count: str, num_input: int, name: str = "inputs"
) -> BadRequest:
    """As TGI's: a request that exceeds the context is refused with both numbers, which its clients parse."""
    wanted = DEFAULT_NEW_TOKENS if params.asked_tokens is None else params.asked_tokens
    total = service.engine.max_seq_len
    if num_input + wanted > total:
        return invalid(
            f"`{name}` tokens + `max_new_tokens` must be <= {total}. "
            f"Given: {count} `{name}` tokens and {wanted} `max_new_tokens`"
        )
    return invalid(f"`{name}` must have less than {service.max_input_tokens + 1} tokens. Given: {count}")


@dataclass(frozen=True, slots=True)
class Question:
    """A request's text and origin: `id` is the caller's, `name` is the prompt's field in errors."""

    id: str
    ids: tuple[int, ...]
    tenant: str = ""
    name: str = "inputs"


def generation_of(
    service: GenerationService, question: Question, params: Parameters, rules: Rules, has_logprobs: bool = False
) -> Generation:
    """The generation that a body asks for. Raises BadRequest in TGI's words."""
    if not rules.has_best:
        refuse_best_of(params)
    if params.adapter_id not in (None, service.name):
        raise BadRequest("adapter_id", f"is {params.adapter_id!r}, but the model of the path is {service.name!r}")
    ids = _truncated(question.ids, params, service.max_input_tokens)
    max_tokens = _new_tokens(service, params, len(ids), question.name)
    sampling = _sampling(params, rules, max_tokens, has_logprobs)
    best_of = params.best_of or 1
    return Generation(question.id, (ids,), sampling, best_of, best_of, params.priority or 0, question.tenant)


def refuse_best_of(params: Parameters) -> None:
    """Of routes that give one answer. Raises BadRequest in TGI's words."""
    if (params.best_of or 1) > 1:
        raise invalid("`best_of` != 1 is not allowed for this endpoint")


def _sampling(params: Parameters, rules: Rules, max_tokens: int, has_logprobs: bool) -> SamplingParams:
    """As TGI: any of temperature (not 1) and what cuts tokens off samples, even without do_sample.

    Raises BadRequest in TGI's words.
    """
    _check(params, rules)
    given = _NAMED.given(params)
    temperature = given.get("temperature", 1.0)
    is_shaped = temperature != 1.0 or any(given.get(name) for name in _CUTS)
    is_sampling = (bool(params.do_sample) or is_shaped) and temperature != 0
    if (params.best_of or 1) > 1 and not is_sampling:
        raise invalid("you must use sampling when `best_of` is > 1")
    return _NAMED.params(
        params,
        temperature=temperature if is_sampling else 0.0,
        max_tokens=max_tokens,
        stop=tuple(params.stop or ()),
        include_stop=True,
        logprobs=(params.top_n_tokens or 0) if has_logprobs else None,
        prompt_logprobs=0 if params.decoder_input_details else None,
        grammar=params.answer_grammar("parameters."),
    )


def _check(params: Parameters, rules: Rules) -> None:
    def require(is_right: bool, text: str) -> None:
        if not is_right:
            raise invalid(text)

    temperature, top_k, top_p = params.temperature, params.top_k, params.top_p
    lowest = 0 if rules.may_be_off else 1
    if temperature is not None:
        require(temperature > 0 or (rules.may_be_off and temperature == 0), "`temperature` must be strictly positive")
        require(temperature <= 100, "`temperature` must be <= 100")
    penalty = params.repetition_penalty
    require(penalty is None or penalty > 0, "`repetition_penalty` must be strictly positive")
    require(penalty is None or penalty <= 100, "`repetition_penalty` must be <= 100")
    require(top_k is None or top_k >= lowest, "`top_k` must be strictly positive" if lowest else "`top_k` must be >= 0")
    require(top_k is None or top_k <= MAX_INT, f"`top_k` must be <= {MAX_INT}")
    if rules.is_top_p_open:
        require(top_p is None or 0 < top_p < 1, "`top_p` must be > 0.0 and < 1.0")
    else:
        require(top_p is None or 0 < top_p <= 1, "`top_p` must be > 0.0 and <= 1.0")
    typical_p = params.typical_p
    require(typical_p is None or 0 < typical_p < 1, "`typical_p` must be > 0.0 and < 1.0")
    seed = params.seed
    require(seed is None or 0 <= seed <= MAX_SEED, f"`seed` must be between 0 and {MAX_SEED}")
    stops = params.stop or ()
    require(len(stops) <= MAX_STOPS, f"`stop` supports up to {MAX_STOPS} stop sequences. Given: {len(stops)}")
    require(all(stops), "`stop` must not hold an empty text")
    best_of = 1 if params.best_of is None else params.best_of
    require(0 < best_of <= MAX_BEST_OF, f"`best_of` must be > 0 and <= {MAX_BEST_OF}. Given: {best_of}")
    require(best_of == 1 or seed is None, "`seed` must not be set when `best_of` > 1")
    require(params.batch_size is None or params.batch_size > 0, "`batch_size` must be strictly positive")
    frequency = params.frequency_penalty
    require(frequency is None or -2 <= frequency <= 2, "`frequency_penalty` must be >= -2.0 and <= 2.0")
    count = params.top_n_tokens
    require(count is None or 0 <= count <= 5, f"`top_n_tokens` must be >= 0 and <= 5. Given: {count}")


def finish_name(reason: FinishReason | None) -> str | None:
    """TGI's finish reasons; a request that was stopped counts as stopped by a sequence."""
    names = {FinishReason.LENGTH: "length", FinishReason.EOS: "eos_token"}
    return None if reason is None else names.get(reason, "stop_sequence")
