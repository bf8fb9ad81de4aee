"""WeightSource: a checkpoint as named tensors, read one at a time."""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import gguf
import numpy as np
import torch

from kvloom.engine.errors import ModelError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as the file holds it. `shape` is [out, in] row-major, whatever the file's own order was.

    kind is "f32", "f16", "bf16" or a GGUF block type ("q8_0", "q4_0", "q4_1", "q4_k", "q5_k", "q6_k");
    data is a read-only view of the bytes: uint8 [rows, bytes a row].
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    data: Bytes

    def float32(self) -> torch.Tensor:
        """The values, dequantised, as a new float32 tensor of `shape`."""
        flat = np.ascontiguousarray(self.data)
        if self.kind == "f32":
            values = flat.reshape(-1).view(np.float32).copy()
        elif self.kind == "f16":
            values = flat.reshape(-1).view(np.float16).astype(np.float32)
        elif self.kind == "bf16":  # the upper half of a float32
            values = (flat.reshape(-1).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            kind = gguf.GGMLQuantizationType[self.kind.upper()]
            values = np.array(gguf.quants.dequantize(flat, kind), dtype=np.float32)
        return torch.from_numpy(values.reshape(self.shape))


def as_rows(data: Bytes, shape: tuple[int, ...]) -> Bytes:
    """The bytes of a row-major tensor as [rows, bytes a row]; a vector is one row."""
    rows = math.prod(shape[:-1])
    view = data.reshape(rows, -1)
    view.flags.writeable = False
    return view


def check_shape(name: str, got: tuple[int, ...], want: tuple[int, ...], file: str) -> None:
    """Raises ModelError when a tensor is not of the shape that the configuration asks for."""
    if got != want:
        raise ModelError(f"{file}: tensor {name} has shape {list(got)}, the configuration asks for {list(want)}")


class WeightSource(Protocol):
    """Tensors by canonical name (models/spec.py). Reading is lazy: a tensor's bytes are touched when asked for."""

    def names(self) -> list[str]: ...

    def tensor(self, name: str) -> RawTensor:
        """Raises ModelError naming the tensor and the file when it is missing, misshapen or cut short."""
        ...
