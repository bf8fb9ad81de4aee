"""WeightSource: a checkpoint as named tensors, read one at a time."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from kvloom.checkpoints.quantized.blocks import form_of, read_blocks
from kvloom.checkpoints.quantized.numbers import LEVELS, Bytes, Floats, Numbers
from kvloom.contract.errors import ModelError

WIDE = ("f32", "f16", "bf16")  # kinds that are numbers, not blocks
_PIECE_VALUES = 1 << 20


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor in the file's form. `shape` is [out, in] row-major, whatever the file's own order.

    kind is "f32", "f16", "bf16" or a GGUF block type of blocks.KINDS; data is a read-only view of the bytes: uint8
    [rows, bytes a row]. factors: what all values are multiplied by, or those of each matrix of a stack.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    data: Bytes
    factors: tuple[float, ...] = (1.0,)

    @property
    def form(self) -> str:
        """The lossless form in memory (numbers.FORM_BITS); "" for a kind of WIDE."""
        return form_of(self.kind)

    def number_pieces(self) -> Iterator[tuple[int, Numbers]]:
        """(first row, numbers) of a matrix that has a form, top to bottom. Raises ModelError for scales like NaN."""
        rows = max(1, _PIECE_VALUES // self.shape[-1])
        for at in range(0, self.shape[0], rows):
            numbers = read_blocks(self.kind, self.data[at : at + rows])
            yield at, (numbers if self._factor == 1 else numbers.scaled(self._factor)).check(self.name)

    def float32(self) -> Floats:
        """The values, dequantised, as a new float32 array of `shape`."""
        return self._values(self.data).reshape(self.shape)

    def float32_pieces(self) -> Iterator[tuple[int, Floats]]:
        """(first row, float32 [rows, in]) of a matrix from top to bottom, a few MB at a time."""
        rows = max(1, _PIECE_VALUES // self.shape[-1])
        for at in range(0, self.shape[0], rows):
            yield at, self._values(self.data[at : at + rows]).reshape(-1, self.shape[-1])

    @property
    def _factor(self) -> np.float32:
        (factor,) = self.factors  # a stack is read matrix by matrix
        return np.float32(factor)

    def _values(self, data: Bytes) -> Floats:
        """float32, flat, of some of the rows."""
        flat = np.ascontiguousarray(data)
        if self.kind in WIDE:
            values = widen(flat.reshape(-1), self.kind)
        else:
            values = read_blocks(self.kind, flat).floats(LEVELS[self.form]).reshape(-1)
        return values if self._factor == 1 else values * self._factor


def widen(data: Bytes, kind: str) -> Floats:
    """Numbers of a kind of WIDE, given as bytes, as new float32 numbers; both flat."""
    if kind == "f32":
        return data.copy().view(np.float32)
    if kind == "f16":
        return data.view(np.float16).astype(np.float32)
    return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)  # the upper half of a float32


def as_rows(data: Bytes, shape: tuple[int, ...]) -> Bytes:
    """The bytes of a row-major tensor as [rows, bytes a row]; a vector is one row."""
    rows = math.prod(shape[:-1])
    view = data.reshape(rows, -1)
    view.flags.writeable = False
    return view


def check_shape(name: str, got: tuple[int, ...], want: tuple[int, ...], file: str) -> None:
    """Raises ModelError when a tensor does not have the shape that follows from the configuration."""
    if got != want:
        raise ModelError(f"{file}: tensor {name} has shape {list(got)}, the configuration asks for {list(want)}")


def has_sizes(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether two shapes differ in dimensions of 1 alone."""
    return [size for size in found if size != 1] == [size for size in wanted if size != 1]


class Tensor(Protocol):
    """The common interface of RawTensor and packed.PackedMatrix."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def form(self) -> str: ...
    def number_pieces(self) -> Iterator[tuple[int, Numbers]]: ...
    def float32(self) -> Floats: ...
    def float32_pieces(self) -> Iterator[tuple[int, Floats]]: ...


class WeightSource(Protocol):
    """Tensors by canonical name (families/spec.py). Reading is lazy: a tensor's bytes are read when asked for."""

    def names(self) -> list[str]:
        """The canonical names of all tensors."""
        ...

    def form(self, name: str) -> str:
        """The form of a tensor, without reading its bytes; see RawTensor."""
        ...

    def tensor(self, name: str) -> Tensor:
        """The tensor. Raises ModelError that names tensor and file when it is missing, misshapen or cut short."""
        ...


@contextlib.contextmanager
def naming(path: Path, field: str = "") -> Iterator[None]:
    """A ModelError that does not name the file or folder does so behind this, and begins with `field`."""
    try:
        yield
    except ModelError as error:
        if str(path) in str(error) and not field:
            raise
        raise ModelError(f"{field}{'' if str(path) in str(error) else f'{path}: '}{error}") from error


class CheckedWeights:
    """A WeightSource over another one, whose tensors are CheckedTensors."""

    def __init__(self, weights: WeightSource, path: Path) -> None:
        self._weights, self._path = weights, path

    def names(self) -> list[str]:
        return self._weights.names()

    def form(self, name: str) -> str:
        return self._weights.form(name)

    def tensor(self, name: str) -> Tensor:
        with naming(self._path):
            return CheckedTensor(self._weights.tensor(name), self._path)


class CheckedTensor:
    """A tensor of the file `path`. Reading it raises ModelError for a value that is no finite number: one NaN among the
    weights makes every answer NaN, or, where it is rounded to 8 bits, anything.
    """

    def __init__(self, tensor: Tensor, path: Path) -> None:
        self.unchecked, self._path = tensor, path
        self.name, self.shape, self.form = tensor.name, tensor.shape, tensor.form

    def number_pieces(self) -> Iterator[tuple[int, Numbers]]:
        with naming(self._path):
            yield from self.unchecked.number_pieces()

    def float32(self) -> Floats:
        with naming(self._path):
            return self._finite(self.unchecked.float32())

    def float32_pieces(self) -> Iterator[tuple[int, Floats]]:
        with naming(self._path):
            for at, values in self.unchecked.float32_pieces():
                yield at, self._finite(values)

    def _finite(self, values: Floats) -> Floats:
        if not np.isfinite(values).all():
            raise ModelError(f"tensor {self.name}: a weight is no finite number")
        return values
