"""FamilyWeights: translates a checkpoint's tensors, in its family's layout, into those that a spec names.

Some files hold q, k and v as one tensor, and gate and up as another; some hold the weights of norms minus one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from kvloom.checkpoints.families.expert_layers import Stacking
from kvloom.checkpoints.families.family import Family
from kvloom.checkpoints.families.interleaved import HalvedHeads
from kvloom.checkpoints.families.spec import DecoderSpec
from kvloom.checkpoints.families.stacked import StackedExperts, stacked_shapes
from kvloom.checkpoints.quantized.numbers import Floats, Numbers
from kvloom.checkpoints.quantized.scheme import Scheme
from kvloom.checkpoints.source import RawTensor, Tensor, WeightSource, as_rows
from kvloom.contract.errors import ModelError

Shapes = dict[str, tuple[int, ...]]
_FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}  # rows in this order


@dataclass(frozen=True, slots=True)
class FileLayout:
    """How files hold a family's tensors. `fused`: see Family; `interleaved`: q and k have rotary partners side by side;
    `is_packed`: experts in MXFP4, as in gpt-oss's folders.
    """

    fused: tuple[str, ...]
    norm_offset: float
    stacking: Stacking
    interleaved: bool
    is_packed: bool = False


def folder_layout(family: Family, scheme: Scheme | None) -> FileLayout:
    """Raises ModelError when the scheme is not for the family's files."""
    is_packed = scheme is not None and scheme.layout == "mxfp4_experts"
    if is_packed and family.stacking != "interleaved":
        raise ModelError(
            f"quantization_config: quant_method mxfp4 is for the experts of gpt-oss, not for {family.name}"
        )
    return FileLayout(family.fused, family.norm_offset, family.stacking, family.interleaved, is_packed)


def gguf_layout(family: Family, has_sections: bool) -> FileLayout:
    """`has_sections`: the file divides a head among time, height and width, which llama.cpp does in halves alone."""
    interleaved = (family.interleaved or family.permuted_gguf) and not has_sections
    return FileLayout(family.fused, 0.0, "parts", interleaved)


def file_shapes(layout: FileLayout, spec: DecoderSpec) -> Shapes:
    """Shapes of the tensors in a file, by canonical name, or by that of a fused or stacked tensor."""
    shapes = stacked_shapes(spec.tensor_shapes(), spec, layout.stacking, layout.is_packed)
    for index in range(spec.num_layers):
        for whole in layout.fused:
            cut = [shapes.pop(f"layers.{index}.{part}") for part in _FUSED[whole]]
            shapes[f"layers.{index}.{whole}"] = sum(rows for rows, _ in cut), cut[0][1]
    return shapes


def adapted(source: WeightSource, layout: FileLayout, spec: DecoderSpec) -> WeightSource:
    """A source of the spec's tensors over `source`, which has the tensors of file_shapes."""
    if spec.experts and layout.stacking:
        source = StackedExperts(source, spec, layout.stacking, layout.is_packed)
    elif layout.fused or layout.norm_offset:
        source = FamilyWeights(source, spec, layout.norm_offset)
    return HalvedHeads(source, spec) if layout.interleaved else source


class FamilyWeights:
    """See adapted."""

    def __init__(self, source: WeightSource, spec: DecoderSpec, norm_offset: float) -> None:
        self._source, self._shapes, self._norm_offset = source, spec.tensor_shapes(), norm_offset
        self._held = set(source.names())

    def names(self) -> list[str]:
        return list(self._shapes)

    def form(self, name: str) -> str:
        return self._source.form(name if name in self._held else self._whole(name)[0])

    def tensor(self, name: str) -> Tensor:
        """Raises ModelError when the spec has no such tensor."""
        if name not in self._shapes:
            raise ModelError(f"tensor {name} is not part of this model")
        if name not in self._held:
            return self._cut(name)
        raw = self._source.tensor(name)
        if not self._norm_offset or not name.endswith("norm"):
            return raw
        values = raw.float32() + np.float32(self._norm_offset)
        return RawTensor(name, raw.shape, "f32", as_rows(values.view(np.uint8).reshape(-1), raw.shape))

    def _cut(self, name: str) -> Tensor:
        """The rows of a fused tensor that are this tensor, unchanged."""
        whole, first = self._whole(name)
        shape = self._shapes[name]
        raw = self._source.tensor(whole)
        if not isinstance(raw, RawTensor):
            return _RowsOf(name, shape, raw, first)
        assert len(raw.data) == math.prod(raw.shape[:-1]), "a row of the matrix is a row of bytes"
        return replace(raw, name=name, shape=shape, data=raw.data[first : first + shape[0]])

    def _whole(self, name: str) -> tuple[str, int]:
        """The fused tensor that contains this tensor, and the index of its first row there."""
        layer, part = name.rsplit(".", 1)
        whole, parts = next((whole, parts) for whole, parts in _FUSED.items() if part in parts)
        before = parts[: parts.index(part)]
        return f"{layer}.{whole}", sum(self._shapes[f"{layer}.{other}"][0] for other in before)


@dataclass(frozen=True, slots=True)
class _RowsOf:
    """Rows, from `first` on, of a matrix that is not stored by rows: it is read up to the last of them."""

    name: str
    shape: tuple[int, ...]
    whole: Tensor
    first: int

    @property
    def form(self) -> str:
        return self.whole.form

    def number_pieces(self) -> Iterator[tuple[int, Numbers]]:
        for at, numbers in self.whole.number_pieces():
            if own := self._own(at, len(numbers.values)):
                least = None if numbers.minimums is None else numbers.minimums[own]
                cut = Numbers(numbers.values[own], numbers.scales[own], least, numbers.run)
                yield max(0, at - self.first), cut

    def float32(self) -> Floats:
        return np.concatenate([values for _, values in self.float32_pieces()])

    def float32_pieces(self) -> Iterator[tuple[int, Floats]]:
        for at, values in self.whole.float32_pieces():
            if own := self._own(at, len(values)):
                yield max(0, at - self.first), values[own]

    def _own(self, at: int, count: int) -> slice | None:
        """Those of `count` rows from `at` on that belong to it; None = none."""
        begin, end = max(at, self.first), min(at + count, self.first + self.shape[0])
        return slice(begin - at, end - at) if begin < end else None
