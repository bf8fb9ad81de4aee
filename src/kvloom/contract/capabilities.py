"""What a request may ask of an engine, by name, so that what an engine cannot do is refused before it runs.

An engine lists in RankInfo.lacks which of FEATURES it does not have, and why. Pure.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from kvloom.contract.errors import BadRequest
from kvloom.contract.request import SamplingParams

# SamplingParams that every engine has: they are the server's own work, or the minimum of any model
ALWAYS = frozenset({"temperature", "max_tokens", "include_stop", "skip_special_tokens"})
_ASKED: Mapping[str, Callable[[SamplingParams], object]] = {
    "top_k": lambda p: p.top_k,
    "top_p": lambda p: p.top_p != 1,
    "min_p": lambda p: p.min_p,
    "typical_p": lambda p: p.typical_p != 1,
    "repetition_penalty": lambda p: p.repetition_penalty != 1,
    "frequency_penalty": lambda p: p.frequency_penalty,
    "presence_penalty": lambda p: p.presence_penalty,
    "logit_bias": lambda p: p.logit_bias,
    "min_tokens": lambda p: p.min_tokens,
    "stop": lambda p: p.stop,
    "stop_token_ids": lambda p: p.stop_token_ids,
    "ignore_eos": lambda p: p.ignore_eos,
    "seed": lambda p: p.seed is not None,
    "logprobs": lambda p: p.logprobs is not None,
    "prompt_logprobs": lambda p: p.prompt_logprobs is not None,
    "scored_from": lambda p: p.scored_from,
    "logprob_ids": lambda p: p.logprob_ids,
    "watermark": lambda p: p.watermark,
    "grammar": lambda p: p.grammar,
    "reasoning_end": lambda p: p.reasoning_end,
    "max_reasoning_tokens": lambda p: p.max_reasoning_tokens is not None,
}


class Asked(Protocol):
    """A Request, or a Generation of the server."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def pooling(self) -> str: ...
    @property
    def is_look(self) -> bool: ...
    @property
    def priority(self) -> int: ...
    @property
    def cache_salt(self) -> str: ...
    @property
    def gives_kv(self) -> bool: ...
    @property
    def kv_location(self) -> object: ...


# features besides SamplingParams; an adapter is named in several ways
_BESIDE: Mapping[str, Callable[[Asked], object]] = {
    "generation": lambda a: not (a.pooling or a.is_look),
    "pooling": lambda a: a.pooling,
    "priority": lambda a: a.priority,
    "cache_salt": lambda a: a.cache_salt,
    "kv_transfer": lambda a: a.gives_kv or a.kv_location,
}
BESIDE = (*_BESIDE, "adapter")
FEATURES = (*_ASKED, *BESIDE)
_NAMES = {
    "grammar": "response_format",
    "reasoning_end": "response_format",
    "max_reasoning_tokens": "thinking",
    "pooling": "input",
    "generation": "prompt",
    "adapter": "model",
    "kv_transfer": "kv_transfer_params",
}  # the caller's more specific word for it


def check_capable(lacks: Mapping[str, str], asked: Asked, adapter: object) -> None:
    """Raises BadRequest that names the first feature asked for that is in `lacks`, with the reason given there.

    `adapter`: truthy when one is asked for.
    """
    for name, why in lacks.items():
        if name in _ASKED:
            is_asked = _ASKED[name](asked.params)
        else:
            is_asked = adapter if name == "adapter" else _BESIDE[name](asked)
        if is_asked:
            raise BadRequest(_NAMES.get(name, name), f"the engine of this model cannot do it: {why}")
