"""Numbers: a matrix in the form of a quantised file.

weight = level of its number * scale + minimum, scale and minimum shared by a run of neighbours in a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from kvloom.checkpoints.quantized.forms import BY_CHANNEL
from kvloom.contract.errors import ModelError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]

_HIGHEST = 65504.0  # scales and minimums are kept as float16
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_IQ1 = (-7, 1, 9, 0, -9, -1, 7, 0)  # eighths of -1, 0, 1 moved up or down by one; 0 is not used, here and below
_IQ2 = (8, 25, 43, 0, -8, -25, -43, 0)
_IQ3_S = tuple(range(1, 16, 2))
_IQ3_XXS = (4, 12, 20, 28, 36, 44, 52, 62)
LEVELS = {  # of each number of a form, float32
    form: np.array(levels, np.float32)
    for form, levels in {
        "int1": (-1, 1),
        "int2": range(-1, 3),
        "int2_256": range(-1, 3),
        "int2_k": range(4),
        "int3_k": range(-4, 4),
        "int4": range(16),
        "int5": range(32),
        "int4_k": range(16),
        "int5_k": range(32),
        "int6_k": range(-32, 32),
        "int8": range(-128, 128),
        "int8_min": range(-128, 128),
        BY_CHANNEL: range(-128, 128),
        "iq4": _IQ4,
        "fp4": _E2M1,
        "fp4_16": _E2M1,
        **dict.fromkeys(("iq1_s", "iq1_m"), _IQ1),
        **dict.fromkeys(("iq2_xxs", "iq2_xs", "iq2_s"), _IQ2),
        "iq3_s": (*_IQ3_S, *(-level for level in _IQ3_S)),
        "iq3_xxs": (*_IQ3_XXS, *(-level for level in _IQ3_XXS)),
    }.items()
}


class Factors(NamedTuple):
    """By what scales and minimums (None = there are none) are multiplied."""

    scales: Floats
    minimums: Floats | None = None

    def each(self, change: Callable[[Floats], Floats]) -> "Factors":
        return Factors(change(self.scales), None if self.minimums is None else change(self.minimums))


@dataclass(frozen=True, slots=True)
class Numbers:
    """Some rows: `values` [rows, in], `scales` and `minimums` (None = zero) [rows, in / run, rounded up]. `factors`
    [rows, in / 256] in the forms whose scales and minimums are small integers (forms.py).
    """

    values: Bytes
    scales: Floats
    minimums: Floats | None
    run: int
    factors: Factors | None = None

    def check(self, name: str) -> "Numbers":
        """Returns itself. Raises ModelError when a scale or minimum cannot be stored: NaN, infinite, or too large."""
        for part in (self.scales, self.minimums, *(self.factors or ())):
            if part is not None and part.size and not np.abs(part).max() <= _HIGHEST:  # NaN is not either
                raise ModelError(f"tensor {name}: a scale is no number below {_HIGHEST:.0f}")
        return self

    @staticmethod
    def joined(parts: Sequence["Numbers"]) -> "Numbers":
        """All rows of several of one form, which lie one below the other."""
        least = [part.minimums for part in parts if part.minimums is not None]
        factors = [part.factors for part in parts if part.factors]
        other = [each.minimums for each in factors if each.minimums is not None]
        return Numbers(
            np.concatenate([part.values for part in parts]),
            np.concatenate([part.scales for part in parts]),
            np.concatenate(least) if least else None,
            parts[0].run,
            Factors(np.concatenate([each.scales for each in factors]), np.concatenate(other) if other else None)
            if factors
            else None,
        )

    def of_rows(self, rows: Any) -> "Numbers":
        """Those of some rows: a slice, or their indices."""
        least = None if self.minimums is None else self.minimums[rows]
        factors = self.factors and self.factors.each(lambda of: of[rows])
        return Numbers(self.values[rows], self.scales[rows], least, self.run, factors)

    def scaled(self, by: np.float32) -> "Numbers":
        """The same times a number."""
        if self.factors is not None:
            return replace(self, factors=self.factors.each(lambda of: of * by))
        least = None if self.minimums is None else self.minimums * by
        return replace(self, scales=self.scales * by, minimums=least)

    def floats(self, levels: Floats) -> Floats:
        """The weights as new float32 numbers [rows, in], where runs are full. `levels`: of the form, forms.LEVELS."""
        rows, cols = self.values.shape
        with np.errstate(invalid="ignore", over="ignore"):  # who asks for them looks for what is no number
            scales, least = self.products()
            found: Floats = levels[self.values].reshape(rows, -1, self.run) * scales[:, :, None]
            if least is not None:
                found += least[:, :, None]
        return found.reshape(rows, cols)

    def products(self) -> tuple[Floats, Floats | None]:
        """Scales and minimums times their factors."""
        if self.factors is None:
            return self.scales, self.minimums
        each = self.scales.shape[1] // self.factors.scales.shape[1]
        spread = self.factors.each(lambda of: np.repeat(of, each, axis=1))
        least = None if self.minimums is None or spread.minimums is None else self.minimums * spread.minimums
        return self.scales * spread.scales, least


def rotated(values: Floats, size: int) -> Floats:
    """values [rows, cols] times H / sqrt(size), each `size` columns for themselves; H is Sylvester's matrix."""
    rows, cols = values.shape
    half = 1
    while half < size:
        pairs = values.reshape(rows, cols // (2 * half), 2, half)
        values = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
        half *= 2
    return np.asarray(values.reshape(rows, cols) * np.float32(size**-0.5), np.float32)
