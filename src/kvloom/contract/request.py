"""What goes into the engine and what comes out: SamplingParams, Request, Delta."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum

import msgspec

from kvloom.contract.errors import BadRequest
from kvloom.contract.images import Sight
from kvloom.contract.pooling import POOLINGS, modes_of


class FinishReason(Enum):
    """Why a request ended. Dialects translate it into their own words."""

    EOS = "eos"  # the model's end-of-sequence token
    STOP = "stop"  # a stop string or stop token of the request
    LENGTH = "length"  # max_tokens or the context is exhausted
    ABORT = "abort"  # the caller cancelled
    ERROR = "error"  # the model failed; Delta.error says how


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop. Neutral values switch a rule off.

    temperature 0 is greedy, and so is one below GREEDY_BELOW. top_k 0, top_p 1, min_p 0, typical_p 1, penalties 0
    (repetition 1) are off.
    logprobs: None = none, 0 = of the chosen token only, n = and of the n most likely ones (at most 20);
    prompt_logprobs likewise for every prompt token from position scored_from on; those before it may come from the
    cache. Log-probabilities are of the raw distribution.
    seed None = drawn by the engine. max_tokens None = until the context is full.
    Raises BadRequest when a value is outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added to its logit
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # keep the stop string in the text
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    scored_from: int = 0
    # tokens whose log-probability is reported in addition to the most likely ones, with logprobs; with max_tokens 0
    # that of following the prompt
    logprob_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    watermark: bool = False
    grammar: str = ""  # grammar of the answer in llguidance's form; "" = unrestricted
    reasoning_end: str = ""  # ends the reasoning with which the answer begins; then the grammar begins
    max_reasoning_tokens: int | None = None  # reasoning tokens before reasoning_end is forced; None = no limit

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # NaN fails the comparison too
                raise BadRequest(name, f"must be between {low:.15g} and {high:.15g}, got {_number(value)}")
        if self.top_p <= 0 or self.typical_p <= 0 or self.repetition_penalty <= 0:
            name = "top_p" if self.top_p <= 0 else "typical_p" if self.typical_p <= 0 else "repetition_penalty"
            raise BadRequest(name, "must be above 0")
        if any(not text for text in self.stop):
            raise BadRequest("stop", "a stop string must not be empty")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken, so no seed matters."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1


@dataclass(frozen=True, slots=True)
class SamplingAdvice:
    """Sampling parameters that a model's makers recommend, used where a request does not set them; None = no advice.

    Ranges as in SamplingParams.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def __str__(self) -> str:
        """The advice, for people."""
        said = ((field.name, getattr(self, field.name)) for field in fields(self))
        return ", ".join(f"{name} {value:g}" for name, value in said if value is not None)


def _number(value: float) -> str:
    """For people; an integer may be too large for a float."""
    return (
        f"{value:.15g}" if isinstance(value, float) or abs(value) < 2**64 else f"a number of {value.bit_length()} bits"
    )


MAX_LOGPROBS = 20
GREEDY_BELOW = 1e-5  # lower temperatures only choose among equal logits, and overflow float32
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0, 100),
    ("top_k", 0, 2**31 - 1),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("typical_p", 0, 1),
    ("repetition_penalty", 0, 100),
    ("frequency_penalty", -2, 2),
    ("presence_penalty", -2, 2),
    ("max_tokens", 0, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("max_reasoning_tokens", 0, 2**31 - 1),
    ("seed", -(2**63), 2**64 - 1),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("scored_from", 0, 2**31 - 1),
)


@dataclass(frozen=True, slots=True)
class KvLocation:
    """Where KV blocks lie outside an engine; all fields must agree before another engine takes them."""

    pool: str
    model: str  # as in RankInfo.kv_model
    layout: str
    block_size: int  # tokens


@dataclass(frozen=True, slots=True)
class KvGiven:
    """The first `num_blocks` blocks of a prompt lie there."""

    location: KvLocation
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. `n` answers of one prompt are n requests (their prompt blocks are shared).

    `answer`: its first tokens, delivered by an engine that has died; only what follows is delivered. With a `pooling`
    (see pooling.modes_of) nothing is generated: max_tokens is 0, and the only delta carries the prompt's pooled
    states. With `is_look`, for an engine with vision, nothing is generated either: the only delta carries the prompt as
    the model reads it, with the tokens of its images.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    cache_salt: str = ""  # requests of different salts share no prefix blocks
    tenant: str = ""  # owner of the request; fairness is between tenants
    priority: int = 0  # 1 (most urgent) to 5, 0 = none given; custom planners may define it differently
    adapter: int = 0  # id of a loaded LoRA adapter; 0 = none
    slo_s: float = 60.0  # seconds within which an answer is wanted; values above 60 count as 60
    pooling: str = ""
    answer: tuple[int, ...] = ()
    # save the prompt's blocks to the outer KV tier; the last delta waits for that and tells their number
    gives_kv: bool = False
    kv_location: KvLocation | None = None  # where another engine has saved them; None = not saved
    sight: Sight | None = None  # images of the prompt; only for an engine whose RankInfo has vision
    is_look: bool = False
    second: int = 0  # where the second of two texts begins, for models with token types; 0 = one text

    @property
    def may_reuse(self) -> bool:
        """Whether cached blocks may replace prompt tokens: not where something of each token is wanted."""
        is_scored = self.params.prompt_logprobs is not None and self.params.scored_from < 2
        return not is_scored and self.pooling in ("", "last")

    @property
    def computes_nothing(self) -> bool:
        """Whether it ends without a step: no token, log-probability or embedding is wanted."""
        wants = self.params.prompt_logprobs is not None or self.pooling or self.is_look
        return self.params.max_tokens == 0 and not wants

    def max_len(self, max_seq_len: int) -> int:
        """Most tokens of prompt and answer, in an engine whose sequences have at most `max_seq_len`."""
        wanted = self.params.max_tokens
        return max_seq_len if wanted is None else min(max_seq_len, len(self.prompt_ids) + wanted)


def capped(request: Request, max_tokens: int | None) -> Request:
    """The request with an answer of at most `max_tokens`; None = unchanged."""
    wanted = request.params.max_tokens
    if max_tokens is None or (wanted is not None and wanted <= max_tokens):
        return request
    return replace(request, params=replace(request.params, max_tokens=max_tokens))


def check_request(request: Request, max_seq_len: int, vocab_size: int) -> None:
    """Raises BadRequest when a model with this context (in tokens) and vocabulary can never run the request."""
    length = len(request.prompt_ids)
    if length == 0:
        raise BadRequest("prompt", "is empty: give at least one token")
    if length + len(request.answer) + (request.params.max_tokens != 0) > max_seq_len:
        raise BadRequest("prompt", f"has {length} tokens, but prompt and answer must fit in {max_seq_len}")
    if "\0" in request.cache_salt:
        raise BadRequest("cache_salt", "must not contain NUL")
    if request.pooling and (not modes_of(request.pooling) or request.params.max_tokens != 0):
        raise BadRequest("pooling", f"must be one of {', '.join(POOLINGS)}, with max_tokens 0")
    given = (
        ("prompt", request.prompt_ids),
        ("answer", request.answer),
        ("logit_bias", request.params.logit_bias),
        ("stop_token_ids", request.params.stop_token_ids),
        ("logprob_ids", request.params.logprob_ids),
    )
    for name, ids in given:
        bad = next((i for i in ids if not 0 <= i < vocab_size), None)
        if bad is not None:
            raise BadRequest(name, f"token id {bad} is outside the vocabulary of {vocab_size}")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural log) of one token, and those of the most likely tokens, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Delta(msgspec.Struct, array_like=True, frozen=True):
    """What one step added to a request. Exactly one delta of a request has a finish_reason, the last one.

    `text` may be empty while `token_ids` is not (half a character, a possible stop string); the joined texts are the
    answer. The first delta carries the prompt's log-probabilities from scored_from on (None for the first prompt token)
    if asked for.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    # one for each of token_ids, if asked for; with max_tokens 0 and logprob_ids one of what would follow the prompt
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token that matched
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    seed: int | None = None  # the seed in use; None when greedy
    error: str | None = None
    is_callers: bool = False  # whether the request is at fault, so that a retry would fail again
    embedding: bytes | None = None  # pooled states, float32, not normalised
    kv_given: KvGiven | None = None  # with the finish_reason of a request that gives its KV blocks
    prompt_ids: tuple[int, ...] | None = None  # result of a look
