"""StackedExperts: splits tensors that hold all experts of a layer into those that a spec names.

"parts"        GGUF: all gates, all ups, all downs: [experts, out, in]
"gate_up"      Granite-MoE's folders: gate above up in one matrix of each expert, [experts, 2 * channels, in]; all downs
"interleaved"  gpt-oss's folders: rows of gate and up alternate; floats are transposed, [experts, in, out], MXFP4 is not
"""

from dataclasses import replace
from typing import Any

import numpy as np

from kvloom.checkpoints.families.expert_layers import Stacking
from kvloom.checkpoints.families.spec import DecoderSpec, Experts
from kvloom.checkpoints.quantized.layout import Scheme
from kvloom.checkpoints.quantized.numbers import Floats
from kvloom.checkpoints.quantized.packed import PackedMatrix, Part
from kvloom.checkpoints.source import RawTensor, Tensor, WeightSource, as_rows
from kvloom.contract.errors import ModelError

Shapes = dict[str, tuple[int, ...]]
_EXPERT = ".experts."
_GROUP = 32  # weights of MXFP4 that share a scale
_MXFP4 = Scheme("mxfp4", 4, _GROUP)


SCALES = "expert_factors"  # of a layer: what each down projection is multiplied by, [experts]


def stacked_shapes(shapes: Shapes, spec: DecoderSpec, stacking: Stacking, kind: str) -> Shapes:
    """`shapes` with stacks instead of experts. `kind`: "packed" in MXFP4, "scaled" with SCALES, or "".

    Raises ModelError when MXFP4 cannot hold them.
    """
    if spec.experts is None or not stacking:
        return shapes
    kept = {name: shape for name, shape in shapes.items() if _EXPERT not in name}
    stacks = _stacks(spec, spec.experts, stacking, kind == "packed")
    if kind == "scaled":
        stacks[SCALES] = (spec.experts.count,)
    for index, layer in enumerate(spec.layers):
        if layer.has_experts:
            kept |= {f"layers.{index}.{name}": shape for name, shape in stacks.items()}
    return kept


def _stacks(spec: DecoderSpec, experts: Experts, stacking: Stacking, is_packed: bool) -> Shapes:
    """Shapes of the stacks of one layer."""
    hidden, count, size = spec.hidden, experts.count, experts.intermediate
    whole = {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}
    if not spec.gates_mlps:
        del whole["gate"]
    elif stacking != "parts":
        whole = {"gate_up": (2 * size, hidden), "down": (hidden, size)}
    shapes: Shapes = {}
    for name, (rows, cols) in whole.items():
        if is_packed:
            if cols % _GROUP:
                raise ModelError(f"experts of {cols} columns do not fill MXFP4's groups of {_GROUP}")
            shapes[f"{name}_experts_blocks"] = (count, rows, cols // _GROUP, _GROUP // 2)
            shapes[f"{name}_experts_scales"] = (count, rows, cols // _GROUP)
        else:
            shapes[f"{name}_experts"] = (count, cols, rows) if stacking == "interleaved" else (count, rows, cols)
        if experts.has_bias:
            shapes[f"{name}_experts_bias"] = (count, rows)
    return shapes


class StackedExperts:
    """A WeightSource over one that has the tensors of stacked_shapes."""

    def __init__(self, source: WeightSource, spec: DecoderSpec, stacking: Stacking, kind: str) -> None:
        self._source, self._stacking = source, stacking
        self._is_packed, self._is_scaled = kind == "packed", kind == "scaled"
        self._shapes = {name: shape for name, shape in spec.tensor_shapes().items() if _EXPERT in name}

    def names(self) -> list[str]:
        own = (name for name in self._source.names() if "_experts" not in name and not name.endswith(SCALES))
        return [*own, *self._shapes]

    def form(self, name: str) -> str:
        if _EXPERT not in name:
            return self._source.form(name)
        if name.endswith("_bias"):
            return ""
        return "fp4" if self._is_packed else self._source.form(self._stack(name)[0])

    def tensor(self, name: str) -> Tensor:
        """Raises ModelError when the spec has no such tensor."""
        if _EXPERT not in name:
            return self._source.tensor(name)
        if name not in self._shapes:
            raise ModelError(f"tensor {name} is not part of this model")
        stack, expert, own = self._stack(name)
        if name.endswith("_bias"):
            raw = self._source.tensor(f"{stack}_bias")
            return _floats(name, raw.float32()[expert, own])
        if self._is_packed:
            return self._packed(name, stack, expert, own)
        raw = self._raw(stack)
        if self._stacking == "interleaved":
            cols = raw.shape[1]
            part = replace(raw, shape=raw.shape[1:], data=raw.data[expert * cols : (expert + 1) * cols])
            return _floats(name, np.ascontiguousarray(part.float32()[:, own].T))
        rows = raw.shape[1]
        data = raw.data[expert * rows : (expert + 1) * rows][own]
        factors = raw.factors[expert:][:1] or raw.factors
        if self._is_scaled and name.endswith(".down"):
            scales = self._source.tensor(f"{name.split(_EXPERT)[0]}.{SCALES}").float32()
            factors = (float(scales[expert]),)
        return replace(raw, name=name, shape=self._shapes[name], data=data, factors=factors)

    def _stack(self, name: str) -> tuple[str, int, slice]:
        """The stack that contains an expert's tensor, the expert's number, and the tensor's rows there."""
        layer, _, expert, part = name.rsplit(".", 3)
        part, size = part.removesuffix("_bias"), self._shapes[name][0]
        if part == "down" or self._stacking == "parts":
            return f"{layer}.{part}_experts", int(expert), slice(None)
        is_up = part == "up"
        own = slice(int(is_up), None, 2) if self._stacking == "interleaved" else slice(is_up * size, (is_up + 1) * size)
        return f"{layer}.gate_up_experts", int(expert), own

    def _packed(self, name: str, stack: str, expert: int, own: slice) -> PackedMatrix:
        ends = {"weight_packed": "blocks", "weight_scale": "scales"}
        parts = {}
        for part, end in ends.items():
            raw = self._raw(f"{stack}_{end}")
            data: Any = raw.data.reshape(raw.shape[0], raw.shape[1], -1)[expert, own]
            parts[part] = Part("U8", data.shape, data)
        return PackedMatrix(name, self._shapes[name], _MXFP4, parts)

    def _raw(self, name: str) -> RawTensor:
        raw = self._source.tensor(name)
        assert isinstance(raw, RawTensor), "stacks are tensors of their own"
        return raw


def _floats(name: str, values: Floats) -> RawTensor:
    values = np.ascontiguousarray(values)
    return RawTensor(name, values.shape, "f32", as_rows(values.view(np.uint8).reshape(-1), values.shape))
