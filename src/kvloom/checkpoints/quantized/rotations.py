"""Hadamard rotations of a linear's input (QuaRot, SpinQuant's R4): weights are stored for inputs x H / sqrt(n).

The rotation is put back into the weights, which gives the same product: (x H) W^T = x (W H)^T, as H is symmetric.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvloom.contract.errors import ModelError

TARGET = re.compile(r"Linear|(re:(\.\*)?)?[\w.]*\w\$?")  # of compressed-tensors; other patterns could take for ever


@dataclass(frozen=True, slots=True)
class Rotation:
    """`targets`, `ignore`: as TARGET says. `size`: inputs that are rotated together; None = all of a linear's."""

    name: str
    targets: tuple[str, ...]
    ignore: tuple[str, ...]
    size: int | None

    def applies(self, module: str) -> bool:
        return _matches(module, self.targets) and not _matches(module, self.ignore)

    def size_of(self, module: str, cols: int) -> int:
        """Inputs of the linear `module` that are rotated together. Raises ModelError."""
        size = cols if self.size is None else self.size
        if size & (size - 1) or cols % size:
            raise ModelError(f"{module}: rotation {self.name[:80]} of {size} of {cols} inputs is not supported")
        return size


def _matches(module: str, targets: Sequence[str]) -> bool:
    """Regular expressions match from the beginning on, other names the whole name."""
    for target in targets:
        name = target.removeprefix("re:").removeprefix(".*").removesuffix("$")
        if not target.startswith("re:"):
            found = target in ("Linear", module)
        elif target.startswith("re:.*"):
            found = module.endswith(name) if target.endswith("$") else name in module
        else:
            found = module == name if target.endswith("$") else module.startswith(name)
        if found:
            return True
    return False
