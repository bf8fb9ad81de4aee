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
