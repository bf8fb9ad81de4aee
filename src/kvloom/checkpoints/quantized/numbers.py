"""Numbers: a matrix as a quantised file holds it, and the forms in which it can be kept in memory as it is.

weight = level of its number * scale + minimum, scale and minimum shared by a run of neighbours in a row.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvloom.contract.errors import ModelError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]

# Form -> bits a weight in memory, scales included; numbers and runs as in rank/kernels/cpu/layout.hpp.
#   int4, int5          0 .. 15 and 0 .. 31, with minimums
#   int6                0 .. 63 for -32 .. 31, runs of 16
#   int8, int8_min      0 .. 255 for -128 .. 127, without and with minimums
#   iq4, fp4            numbers of IQ4_NL's and of E2M1's table, the latter doubled
FORM_BITS = {"int4": 5.0, "int5": 6.0, "int6": 7.0, "int8": 8.5, "int8_min": 9.0, "iq4": 4.5, "fp4": 4.5}
_HIGHEST = 65504.0  # scales and minimums are kept as float16


def number_bits(form: str) -> int:
    """Of a number of the form, without scales."""
    return int(next(letter for letter in form if letter.isdigit()))


@dataclass(frozen=True, slots=True)
class Numbers:
    """Some rows: `values` [rows, in], `scales` and `minimums` (None = zero) [rows, in / run, rounded up]."""

    values: Bytes
    scales: Floats
    minimums: Floats | None
    run: int

    def check(self, name: str) -> "Numbers":
        """Itself. Raises ModelError when a scale or minimum cannot be kept: NaN, infinite, or too large."""
        for part in (self.scales, self.minimums):
            if part is not None and part.size and not np.abs(part).max() <= _HIGHEST:  # NaN is not either
                raise ModelError(f"tensor {name}: a scale is no number below {_HIGHEST:.0f}")
        return self
