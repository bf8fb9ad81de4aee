"""WeightSource: a checkpoint as named tensors, read one at a time."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as the file holds it. `shape` is [out, in] row-major, whatever the file's own order was.

    kind is "f32", "f16", "bf16" or a GGUF block type ("q8_0", "q4_0", "q4_1", "q4_k", "q5_k", "q6_k");
    data is a read-only view of the bytes: uint8 [rows, bytes a row].
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    data: np.ndarray[Any, np.dtype[np.uint8]]

    def float32(self) -> torch.Tensor:
        """The values, dequantised, as a new float32 tensor of `shape`."""
        raise NotImplementedError  # replaced by weights/dequant in the same change that reads files


class WeightSource(Protocol):
    """Tensors by canonical name (models/spec.py). Reading is lazy: a tensor's bytes are touched when asked for."""

    def names(self) -> list[str]: ...

    def tensor(self, name: str) -> RawTensor:
        """Raises ModelError naming the tensor and the file when it is missing, misshapen or cut short."""
        ...
