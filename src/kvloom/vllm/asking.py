"""Translates requests into vLLM's terms, and its outputs into ours. vLLM's classes are passed in."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvloom.contract.errors import BadRequest
from kvloom.contract.hosted import Start
from kvloom.contract.messages import Logprob
from kvloom.contract.sampling import ROWS, SamplingParams

# features of capabilities.FEATURES that vLLM lacks, however it was started
LACKS: Mapping[str, str] = {name: row.lacks_vllm for name, row in ROWS.items() if row.lacks_vllm}
_PASSED = {  # our names -> vLLM's
    name: row.vllm or name
    for name, row in ROWS.items()
    if row.kind in ("shapes", "cuts") and not row.is_composed and name not in LACKS
}


def lacks_of(tasks: Collection[str], policy: str) -> dict[str, str]:
    """Features that vLLM lacks, with reasons. `tasks`: those of the loaded model; `policy`: of vLLM's scheduler."""
    lacks = dict(LACKS)
    if "embed" not in tasks:
        lacks["pooling"] = "vLLM was started to generate; --vllm runner=pooling makes embeddings, and nothing else"
    if "generate" not in tasks:
        lacks["generation"] = "vLLM was started for embeddings (runner=pooling), which generates nothing"
    if policy != "priority":
        lacks["priority"] = f"vLLM was started with scheduling_policy={policy}; it takes priority"
    return lacks


def sampling_fields(order: Start, eos_ids: Sequence[int]) -> dict[str, Any]:
    """Fields of vLLM's SamplingParams, except the grammar. Raises BadRequest."""
    params = order.params
    if params.logprob_ids and params.logprobs:
        raise BadRequest("logprobs", "must be 0 where the log-probabilities of given tokens are asked for, with vLLM")
    ends = [*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)]
    return {
        **{theirs: getattr(params, name) for name, theirs in _PASSED.items()},
        "logit_bias": dict(params.logit_bias) or None,
        "max_tokens": max(1, order.max_tokens),
        "min_tokens": min(params.min_tokens, max(1, order.max_tokens)),
        "stop_token_ids": sorted(set(ends)),
        "ignore_eos": True,  # stop_token_ids contain kvloom's end-of-sequence ids
        "seed": None if params.is_greedy else order.seed,
        "logprobs": None if params.logprob_ids else params.logprobs,
        "logprob_token_ids": list(params.logprob_ids) or None,
        "prompt_logprobs": params.prompt_logprobs,
        "detokenize": False,
        "skip_clone": True,
    }


def kind_of(params: SamplingParams) -> str:
    """The kind of a request: requests of different kinds must not share a step; "" may share with all.

    vLLM's first model runner (vllm/v1/sample/sampler.py) reports either the best tokens for all requests or, if one
    asks for given tokens, the given tokens for all: the log-probabilities of other requests are -inf then.
    """
    if params.logprob_ids:
        return "given tokens"
    return "best tokens" if params.logprobs is not None else ""


_NAMES = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])*/|@([a-z_0-9]+)')


def lark_of(grammar: str) -> str:
    """One Lark grammar, which vLLM passes on, from llguidance's form, which may have several parts."""
    if not grammar.lstrip().startswith("{"):  # llguidance accepts plain Lark too; vLLM might mistake it for GBNF
        return grammar if "%llguidance" in grammar else f"%llguidance {{}}\n{grammar}"
    first, *others = json.loads(grammar)["grammars"]
    named = {other["name"]: other for other in others}
    if first.get("lark_grammar") is None:
        return f"%llguidance {{}}\nstart: {_part(first)}"
    rules = _NAMES.sub(lambda m: f"part_{m[1]}" if m[1] in named else m[0], first["lark_grammar"])
    head = [] if "%llguidance" in rules else ["%llguidance {}"]
    return "\n".join([*head, rules, *(f"part_{name}: {_part(other)}" for name, other in named.items())])


def _part(grammar: Mapping[str, Any]) -> str:
    """A grammar as the right-hand side of a rule."""
    if grammar.get("lark_grammar") is not None:
        return f"%lark {{\n{grammar['lark_grammar']}\n}}"
    return f"%json {json.dumps(grammar['json_schema'])}"


def priority_of(order: Start) -> int:
    """vLLM's priority, the smallest first; requests without one are in the middle, as in kvloom's own scheduler."""
    return order.priority or 3


def logprob_of(token_id: int, found: Mapping[int, Any], num_top: int, also: Sequence[int] = ()) -> Logprob:
    """A token's Logprob. `found`: vLLM's, of the chosen token and others; reports the `num_top` best, best first, or
    those of `also`.
    """
    if also:
        named = [(id, float(found[id].logprob)) for id in also if id in found]
        return Logprob(token_id, float(found[token_id].logprob), named)
    best = sorted(found.items(), key=lambda item: (item[1].rank or 0, item[0]))[:num_top]
    return Logprob(token_id, float(found[token_id].logprob), [(id, float(value.logprob)) for id, value in best])
