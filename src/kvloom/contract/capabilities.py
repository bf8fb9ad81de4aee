"""What a request may ask of an engine, by name, so that what one cannot do is refused before it runs.

An engine says in RankInfo.lacks which of FEATURES it has not, and why. Pure.
"""

from collections.abc import Callable, Mapping

from kvloom.contract.errors import BadRequest
from kvloom.contract.request import Request, SamplingParams

# SamplingParams that every engine has: the server's own work, or the least that a model does
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
    "logprob_ids": lambda p: p.logprob_ids,
    "watermark": lambda p: p.watermark,
    "grammar": lambda p: p.grammar,
    "reasoning_end": lambda p: p.reasoning_end,
    "max_reasoning_tokens": lambda p: p.max_reasoning_tokens is not None,
}
# what is asked beside SamplingParams
BESIDE = ("generation", "pooling", "adapter", "priority", "cache_salt", "kv_transfer")
FEATURES = (*_ASKED, *BESIDE)
_NAMES = {
    "grammar": "response_format",
    "reasoning_end": "response_format",
    "max_reasoning_tokens": "thinking",
    "pooling": "input",
    "generation": "prompt",
    "adapter": "model",
    "kv_transfer": "kv_transfer_params",
}  # what is closer to the caller's word for it


def check_capable(lacks: Mapping[str, str], params: SamplingParams, beside: Mapping[str, object]) -> None:
    """Raises BadRequest naming the first thing that is asked for and is one of `lacks`, with the reason given there.

    `beside`: of BESIDE, each with something true when it is asked for.
    """
    for name, why in lacks.items():
        asked = _ASKED[name](params) if name in _ASKED else beside.get(name)
        if asked:
            raise BadRequest(_NAMES.get(name, name), f"the engine of this model cannot do it: {why}")


def check_request_capable(lacks: Mapping[str, str], request: Request) -> None:
    """check_capable for what an engine is handed itself, whoever handed it."""
    if lacks:
        beside = {
            "generation": not (request.pooling or request.is_look),
            "pooling": request.pooling,
            "adapter": request.adapter,
            "priority": request.priority,
            "cache_salt": request.cache_salt,
            "kv_transfer": request.gives_kv or request.kv_place,
        }
        check_capable(lacks, request.params, beside)
