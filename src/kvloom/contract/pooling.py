"""Embeddings: how the states of a prompt's tokens become one vector."""

import math
from array import array

POOLINGS = ("last", "mean", "cls")  # the last token's state, the mean of all, the first token's


def unit(data: bytes, num_dimensions: int | None = None) -> "array[float]":
    """A pooled vector (float32) of length 1; with `num_dimensions` its first so many, of length 1 again."""
    values = array("f", data)[:num_dimensions]
    length = math.hypot(*values)
    return array("f", [value / length for value in values]) if length > 0 else values
