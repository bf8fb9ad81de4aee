"""Hadamard rotations of a linear's input (QuaRot, SpinQuant's R4): weights are stored for inputs x H / sqrt(n).

The rotation is put back into the weights, which gives the same product: (x H) W^T = x (W H)^T, as H is symmetric.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvloom.contract.errors import ModelError

_WORD = r"(?:\w|\.|\\\.)+"
_PART = rf"\w|-|\\d[*+]?|\\\.|\.[*+]?|\[\w-\w\][*+]?|\((?:\?:)?{_WORD}(?:\|{_WORD})*\)|\^|\$"
_TARGET = re.compile(rf"[\w.]+|re:(?:{_PART})*")
_MOST_REPEATS = 4


def is_target(text: str) -> bool:
    """Whether it names linears as compressed-tensors does: by their whole name, "Linear" for all, or a regular
    expression behind "re:" that cannot take for ever: nothing is repeated within what is repeated.
    """
    return _TARGET.fullmatch(text) is not None and sum(text.count(mark) for mark in "*+") <= _MOST_REPEATS


def is_meant(module: str, target: str) -> bool:
    """Whether a target names the linear `module`. Expressions match from the beginning on."""
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target in ("Linear", module)


@dataclass(frozen=True, slots=True)
class Rotation:
    """`targets`, `ignore`: see is_target. `size`: inputs that are rotated together; None = all of a linear's."""

    name: str
    targets: tuple[str, ...]
    ignore: tuple[str, ...]
    size: int | None

    def applies(self, module: str) -> bool:
        return _any_means(self.targets, module) and not _any_means(self.ignore, module)

    def size_of(self, module: str, cols: int) -> int:
        """Inputs of the linear `module` that are rotated together. Raises ModelError."""
        size = cols if self.size is None else self.size
        if size & (size - 1) or cols % size:
            raise ModelError(f"{module}: rotation {self.name[:80]} of {size} of {cols} inputs is not supported")
        return size


def _any_means(targets: Sequence[str], module: str) -> bool:
    return any(is_meant(module, target) for target in targets)
