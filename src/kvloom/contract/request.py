"""What goes into the engine and what comes out: Request, Delta."""

from dataclasses import dataclass, replace
from enum import Enum

import msgspec

from kvloom.contract.errors import BadRequest
from kvloom.contract.images import Sight
from kvloom.contract.pooling import POOLINGS, modes_of
from kvloom.contract.sampling import PLAIN, SamplingParams


class FinishReason(Enum):
    """Why a request ended. Dialects translate it into their own words."""

    EOS = "eos"  # the model's end-of-sequence token
    STOP = "stop"  # a stop string or stop token of the request
    LENGTH = "length"  # max_tokens or the context is exhausted
    ABORT = "abort"  # the caller cancelled
    ERROR = "error"  # the model failed; Delta.error says how


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
    params: SamplingParams = PLAIN
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
    prediction: tuple[int, ...] = ()  # tokens of which the answer may consist, as far as is known: a source of guesses
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
        ("prediction", request.prediction),
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
    num_guessed: tuple[int, int] = (0, 0)  # with the finish_reason: drafted tokens that were right, and wrong
