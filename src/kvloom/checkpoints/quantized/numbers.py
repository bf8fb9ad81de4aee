"""Numbers: a matrix in the form of a quantised file.

weight = level of its number * scale + minimum, scale and minimum shared by a run of neighbours in a row.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvloom.contract.errors import ModelError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]

_HIGHEST = 65504.0  # scales and minimums are kept as float16


@dataclass(frozen=True, slots=True)
class Numbers:
    """Some rows: `values` [rows, in], `scales` and `minimums` (None = zero) [rows, in / run, rounded up]."""

    values: Bytes
    scales: Floats
    minimums: Floats | None
    run: int

    def check(self, name: str) -> "Numbers":
        """Returns itself. Raises ModelError when a scale or minimum cannot be stored: NaN, infinite, or too large."""
        for part in (self.scales, self.minimums):
            if part is not None and part.size and not np.abs(part).max() <= _HIGHEST:  # NaN is not either
                raise ModelError(f"tensor {name}: a scale is no number below {_HIGHEST:.0f}")
        return self


def rotated(values: Floats, size: int) -> Floats:
    """values [rows, cols] times H / sqrt(size), each `size` columns for themselves; H is Sylvester's matrix."""
    rows, cols = values.shape
    half = 1
    while half < size:
        pairs = values.reshape(rows, cols // (2 * half), 2, half)
        values = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
        half *= 2
    return np.asarray(values.reshape(rows, cols) * np.float32(size**-0.5), np.float32)
