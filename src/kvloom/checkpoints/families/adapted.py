"""FamilyWeights: translates a checkpoint's tensors, in its family's layout, into those that a spec names.

Some files hold q, k and v as one tensor, and gate and up as another; some hold the weights of norms minus one; folders
hold logarithms of decays.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvloom.checkpoints.families.expert_layers import Stacking
from kvloom.checkpoints.families.family import Factors, Family
from kvloom.checkpoints.families.interleaved import HalvedHeads, Order
from kvloom.checkpoints.families.latent_weights import LatentWeights, latent_file_shapes
from kvloom.checkpoints.families.multiplied import multiplied
from kvloom.checkpoints.families.picked import PICKED, pick, rows_of
from kvloom.checkpoints.families.spec import DecoderSpec
from kvloom.checkpoints.families.stacked import StackedExperts, stacked_shapes
from kvloom.checkpoints.families.values import flag
from kvloom.checkpoints.quantized.layout import Scheme
from kvloom.checkpoints.quantized.numbers import Floats, Numbers
from kvloom.checkpoints.source import RawTensor, Tensor, WeightSource, as_rows
from kvloom.contract.errors import ModelError

Shapes = dict[str, tuple[int, ...]]
_FUSED = {  # rows in this order
    "qkv": ("q", "k", "v"),
    "gate_up": ("gate", "up"),
    "shared_gate_up": ("shared_gate", "shared_up"),
    "mamba_in": ("gate_in", "conv_in", "decay_in"),
}
WHOLES = _FUSED | PICKED
_DECAY = ".decay"
_PLAIN_NORM = "out_norm"  # has no offset in any file


@dataclass(frozen=True, slots=True)
class FileLayout:
    """How files hold a family's tensors. `fused`: see Family; `interleaved`: q and k have rotary partners side by side;
    gpt-oss's folders have experts in MXFP4, Gemma 4's a scale for each. `has_kv_up`: see latent_weights.py.
    """

    fused: tuple[str, ...]
    norm_offset: float
    stacking: Stacking
    interleaved: bool
    experts: str = ""  # see stacked_shapes
    has_log_decay: bool = False
    factors: Factors = field(default_factory=dict)
    has_kv_up: bool = False


def folder_layout(family: Family, scheme: Scheme | None, names: Iterable[str], config: Mapping[str, Any]) -> FileLayout:
    """`names`: of the files' tensors; experts may have tensors of their own where their family stacks gate and up.
    Raises ModelError when the scheme is not for the family's files.
    """
    is_packed = scheme is not None and scheme.layout == "mxfp4_experts"
    if is_packed and family.stacking != "interleaved":
        raise ModelError(
            f"quantization_config: quant_method mxfp4 is for the experts of gpt-oss, not for {family.name}"
        )
    stacking = family.stacking
    if stacking == "gate_up" and any(".experts.0." in name for name in names):
        stacking = ""
    if scheme is not None and family.factors is not None:
        raise ModelError(f"quantization_config is not supported by {family.name}, whose multipliers are in its weights")
    factors = family.factors({**family.defaults, **config}) if family.factors else {}
    has_log_decay = family.recurrent is not None
    has_scales = family.mixture is not None and family.mixture.has_dense
    experts = "packed" if is_packed else "scaled" if has_scales else ""
    interleaved = family.interleaved and flag(config, "rope_interleave", default=True)
    layout = FileLayout(family.fused, family.norm_offset, stacking, interleaved, experts, has_log_decay, factors)
    return replace(layout, has_kv_up=family.has_latents)


def gguf_layout(
    family: Family, has_sections: bool, stacking: Stacking = "parts", has_kv_up: bool = False
) -> FileLayout:
    """`has_sections`: the file divides a head among time, height and width, which llama.cpp does in halves alone."""
    interleaved = (family.interleaved or family.permuted_gguf) and not has_sections
    return FileLayout(family.fused, 0.0, stacking, interleaved, has_kv_up=has_kv_up)


def file_shapes(layout: FileLayout, spec: DecoderSpec) -> Shapes:
    """Shapes of the tensors in a file, by canonical name, or by that of a fused or stacked tensor."""
    shapes = stacked_shapes(spec.tensor_shapes(), spec, layout.stacking, layout.experts)
    for index in range(spec.num_layers):
        for whole in layout.fused:
            names = [f"layers.{index}.{part}" for part in WHOLES[whole]]
            if names[0] in shapes:
                cut = [shapes.pop(name) for name in names]
                shapes[f"layers.{index}.{whole}"] = sum(rows for rows, _ in cut), cut[0][1]
    return latent_file_shapes(shapes, spec, layout.has_kv_up)


def adapted(source: WeightSource, layout: FileLayout, spec: DecoderSpec) -> WeightSource:
    """A source of the spec's tensors over `source`, which has the tensors of file_shapes."""
    if spec.experts and layout.stacking:
        source = StackedExperts(source, spec, layout.stacking, layout.experts)
    if spec.has_latents:
        source = LatentWeights(source, spec, layout.has_kv_up)
    if layout.fused or layout.norm_offset or layout.has_log_decay:
        source = FamilyWeights(source, spec, layout)
    return HalvedHeads(source, spec) if layout.interleaved else source


def parts_of(whole: str, layer: int, spec: DecoderSpec) -> dict[str, Order]:
    """What files hold as `whole`, of WHOLES: for each of its tensors by canonical name their rows there."""
    shapes, first, found = spec.tensor_shapes(), 0, {}
    for part in WHOLES[whole]:
        name = f"layers.{layer}.{part}"
        rows = np.arange(first, first + shapes[name][0])
        found[name] = rows_of(part, spec.layers[layer].mixer) if whole in PICKED else rows
        first += len(rows)
    return found


class FamilyWeights:
    """See adapted."""

    def __init__(self, source: WeightSource, spec: DecoderSpec, layout: FileLayout) -> None:
        self._source, self._shapes, self._layout = source, spec.tensor_shapes(), layout
        self._mixers = [layer.mixer for layer in spec.layers]
        self._held = set(source.names())

    def names(self) -> list[str]:
        return list(self._shapes)

    def form(self, name: str) -> str:
        return self._source.form(name if name in self._held else self._whole(name))

    def tensor(self, name: str) -> Tensor:
        """Raises ModelError when the spec has no such tensor."""
        if name not in self._shapes:
            raise ModelError(f"tensor {name} is not part of this model")
        factors = self._layout.factors.get(name.rsplit(".", 1)[-1])
        return multiplied(self._tensor(name), factors) if factors else self._tensor(name)

    def _tensor(self, name: str) -> Tensor:
        """Without factors."""
        if name not in self._held:
            return self._cut(name)
        raw, offset = self._source.tensor(name), self._layout.norm_offset
        if offset and name.endswith("norm") and not name.endswith(_PLAIN_NORM):
            return _floats(name, raw.float32() + np.float32(offset))
        if self._layout.has_log_decay and name.endswith(_DECAY):
            return _floats(name, -np.exp(raw.float32()))
        return raw

    def _cut(self, name: str) -> Tensor:
        """The rows of a fused tensor that are this tensor, unchanged."""
        whole, shape = self._whole(name), self._shapes[name]
        raw = self._source.tensor(whole)
        layer, part = name.rsplit(".", 1)
        if whole.removeprefix(f"{layer}.") in PICKED:
            return pick(name, raw, rows_of(part, self._mixers[int(layer.removeprefix("layers."))]))
        first = self._first_row(name)
        if not isinstance(raw, RawTensor):
            return _RowsOf(name, shape, raw, first)
        assert len(raw.data) == math.prod(raw.shape[:-1]), "a row of the matrix is a row of bytes"
        return replace(raw, name=name, shape=shape, data=raw.data[first : first + shape[0]])

    def _whole(self, name: str) -> str:
        """The fused tensor that contains this tensor."""
        layer, part = name.rsplit(".", 1)
        wholes = (f"{layer}.{whole}" for whole, parts in WHOLES.items() if part in parts)
        return next(whole for whole in wholes if whole in self._held)

    def _first_row(self, name: str) -> int:
        """Its first row in a tensor of _FUSED."""
        layer, part = name.rsplit(".", 1)
        parts = next(parts for parts in _FUSED.values() if part in parts)
        return sum(self._shapes[f"{layer}.{other}"][0] for other in parts[: parts.index(part)])


def _floats(name: str, values: Floats) -> RawTensor:
    return RawTensor(name, values.shape, "f32", as_rows(values.view(np.uint8).reshape(-1), values.shape))


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
                yield max(0, at - self.first), numbers.of_rows(own)

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
