"""How a request goes on in another process than the one that gave the first tokens of its answer. Pure.

Where the next token follows from the tokens before it alone, they are given as a prompt. Else (a random state, counts
of the answer's tokens, a grammar's state) the answer is made again from its beginning, with its seed, and must be the
same.
"""

from dataclasses import replace

from kvloom.contract.request import SamplingParams

OTHERWISE = (
    "the model's process died, and the one after it did not make the same answer again: it cannot go on; "
    "ask again, or with temperature 0"
)


def follows(params: SamplingParams) -> bool:
    """Whether the tokens so far are all that the next one depends on."""
    counts_answer = params.frequency_penalty or params.presence_penalty
    return params.is_greedy and not counts_answer and not params.grammar and not params.reasoning_end


def behind(params: SamplingParams, num_tokens: int) -> SamplingParams:
    """The parameters for what comes after `num_tokens` of the answer, which are part of the prompt now."""
    least = max(0, params.min_tokens - num_tokens)
    most = None if params.max_tokens is None else params.max_tokens - num_tokens
    return replace(params, min_tokens=least, max_tokens=most, prompt_logprobs=None)
