"""From the log-probabilities of labels to the numbers of an answer. Pure."""

import math
from collections.abc import Sequence

from kvloom.contract.errors import ServingError
from kvloom.contract.request import FinishReason
from kvloom.server.serving.generation import Answer

# decimals of what is told: some clients check that a score follows from its probabilities as far as these are written
# out, which the last bits of a float do not withstand
_DECIMALS = 12


def logprob_of(answer: Answer) -> float:
    """Of a label's tokens, followed by the end of the answer. Raises ServingError when the request was stopped."""
    if answer.finish_reason is not FinishReason.LENGTH:
        raise ServingError("the request was stopped before its answers were there")
    of_tokens = sum(value.logprob for value in answer.prompt_logprobs or () if value is not None)
    return of_tokens + sum(_log_sum([logprob for _, logprob in value.top]) for value in answer.logprobs)


def probabilities(logprobs: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Of one label each, given that the answer is one of them. `temperature` above 1 evens them out; above 0."""
    largest = max(logprobs)
    if largest == -math.inf:
        return [1 / len(logprobs)] * len(logprobs)
    weights = [math.exp((logprob - largest) / temperature) for logprob in logprobs]
    return [weight / sum(weights) for weight in weights]


def told(number: float) -> float:
    """As answers tell it."""
    return round(number, _DECIMALS)


def level(probs: Sequence[float]) -> float:
    """The expected level, 0 to len(probs) - 1."""
    return min(sum(index * prob for index, prob in enumerate(probs)), len(probs) - 1.0)


def choice_confidence(probs: Sequence[float]) -> float:
    """0 where all are equally likely, 1 where one is certain. TypeSafe's formula, whose interface /v1/systemone is."""
    if len(probs) == 1:
        return 1.0
    even = 1 / len(probs)
    return max(0.0, (max(probs) - even) / (1 - even))


def score_confidence(probs: Sequence[float]) -> float:
    """1 less the mean distance from the likeliest level, which is 1 where all are as likely as others; TypeSafe's."""
    count = len(probs)
    if count == 1:
        return 1.0
    likeliest = max(range(count), key=probs.__getitem__)
    distance = sum(prob * abs(index - likeliest) for index, prob in enumerate(probs))
    even = sum(abs(index - (count - 1) / 2) for index in range(count)) / count
    return max(0.0, 1 - distance / even)


def _log_sum(logprobs: Sequence[float]) -> float:
    largest = max(logprobs)
    if largest == -math.inf:
        return largest
    return largest + math.log(sum(math.exp(logprob - largest) for logprob in logprobs))
