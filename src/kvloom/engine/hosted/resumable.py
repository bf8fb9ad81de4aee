"""How a request continues on another host than the one that generated the first tokens of its answer. Pure.

Where the next token depends on the tokens before it alone, these are sent as the prompt. Otherwise (a random state,
penalties over the answer, a grammar) the host generates the answer again from the beginning with the same seed, and
must produce the same tokens.
"""

from dataclasses import replace

from kvloom.contract.sampling import ROWS, SamplingParams, is_asked

OTHERWISE = (
    "the model's process died, and the one after it did not make the same answer again: it cannot go on; "
    "ask again, or with temperature 0"
)


_COUNTING = tuple(name for name, row in ROWS.items() if row.counts_answer)


def follows(params: SamplingParams) -> bool:
    """Whether the next token depends on the tokens so far and on nothing else."""
    return params.is_greedy and not any(is_asked(params, name) for name in _COUNTING)


def behind(params: SamplingParams, num_tokens: int) -> SamplingParams:
    """The parameters for the rest of an answer whose first `num_tokens` tokens have become part of the prompt."""
    least = max(0, params.min_tokens - num_tokens)
    most = None if params.max_tokens is None else params.max_tokens - num_tokens
    return replace(params, min_tokens=least, max_tokens=most, prompt_logprobs=None)
