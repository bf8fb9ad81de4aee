"""Embeddings: how the states of a prompt's tokens become one vector."""

import math
from array import array
from collections.abc import Sequence

POOLINGS = ("last", "mean", "cls")  # the last token's state, the mean of all, the first token's


def modes_of(pooling: str) -> tuple[str, ...]:
    """The modes of a pooling, whose vectors follow each other: of "mean+cls" these two; () if one is not known."""
    modes = tuple(pooling.split("+"))
    return modes if all(mode in POOLINGS for mode in modes) else ()


def unit(data: bytes, num_dimensions: int | None = None) -> "array[float]":
    """A pooled vector (float32) scaled to length 1; with `num_dimensions` cut to these first, then scaled."""
    values = array("f", data)[:num_dimensions]
    length = math.hypot(*values)
    return array("f", [value / length for value in values]) if length > 0 else values


def scores(numbers: Sequence[float], activation: str) -> list[float]:
    """Scores of the labels from a classification head's numbers: "softmax", "sigmoid" or "identity"."""
    if activation == "identity":
        return list(numbers)
    if activation == "sigmoid":
        return [_sigmoid(number) for number in numbers]
    largest = max(numbers)
    weights = [math.exp(number - largest) for number in numbers]
    return [weight / sum(weights) for weight in weights]


def _sigmoid(x: float) -> float:
    """Computed with the exponential that cannot overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
