"""Multiplied: a matrix whose rows are multiplied by factors that a configuration has beside it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvloom.checkpoints.quantized.numbers import Floats, Numbers
from kvloom.checkpoints.source import Tensor


@dataclass(frozen=True, slots=True)
class Multiplied:
    """`whole`, which is not quantised, times a factor for each row."""

    whole: Tensor
    factors: Floats  # [rows]

    @property
    def name(self) -> str:
        return self.whole.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape

    @property
    def form(self) -> str:
        return ""

    def number_pieces(self) -> Iterator[tuple[int, Numbers]]:
        yield from ()

    def float32(self) -> Floats:
        return self.whole.float32() * self.factors[:, None]

    def float32_pieces(self) -> Iterator[tuple[int, Floats]]:
        for at, values in self.whole.float32_pieces():
            yield at, values * self.factors[at : at + len(values), None]


def multiplied(tensor: Tensor, parts: tuple[tuple[int, float], ...]) -> Tensor:
    """`parts`: see Factors."""
    counts = [count or tensor.shape[0] for count, _ in parts]
    factors = np.repeat(np.array([factor for _, factor in parts], np.float32), counts)
    return tensor if (factors == 1).all() else Multiplied(tensor, factors)
