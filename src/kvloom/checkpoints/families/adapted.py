"""FamilyWeights: a checkpoint's tensors as its family's files hold them, turned into those that a spec names.

Some files hold q, k and v as one tensor, gate and up as another; some hold the weights of norms less one.
"""

import math
from dataclasses import replace

import numpy as np

from kvloom.checkpoints.families.family import Family
from kvloom.checkpoints.families.spec import DecoderSpec
from kvloom.checkpoints.source import RawTensor, WeightSource, as_rows
from kvloom.contract.errors import ModelError

Shapes = dict[str, tuple[int, ...]]
_FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}  # rows in this order


def file_shapes(family: Family, spec: DecoderSpec) -> Shapes:
    """The tensors that a file of this family holds, by canonical name or that of a fused one."""
    shapes = spec.tensor_shapes()
    if not family.fused:
        return shapes
    for index in range(spec.num_layers):
        for whole, parts in _FUSED.items():
            cut = [shapes.pop(f"layers.{index}.{part}") for part in parts]
            shapes[f"layers.{index}.{whole}"] = sum(rows for rows, _ in cut), cut[0][1]
    return shapes


def adapted(source: WeightSource, family: Family, spec: DecoderSpec, norm_offset: float) -> WeightSource:
    """`source` has the tensors of file_shapes; `norm_offset` is added to every norm's weight."""
    return FamilyWeights(source, spec, norm_offset) if family.fused or norm_offset else source


class FamilyWeights:
    """See adapted."""

    def __init__(self, source: WeightSource, spec: DecoderSpec, norm_offset: float) -> None:
        self._source, self._shapes, self._norm_offset = source, spec.tensor_shapes(), norm_offset
        self._held = set(source.names())

    def names(self) -> list[str]:
        return list(self._shapes)

    def form(self, name: str) -> str:
        return self._source.form(name if name in self._held else self._whole(name)[0])

    def tensor(self, name: str) -> RawTensor:
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

    def _cut(self, name: str) -> RawTensor:
        """Rows of a fused tensor, as they are."""
        whole, first = self._whole(name)
        shape = self._shapes[name]
        raw = self._source.tensor(whole)
        assert len(raw.data) == math.prod(raw.shape[:-1]), "a row of the matrix is a row of bytes"
        return replace(raw, name=name, shape=shape, data=raw.data[first : first + shape[0]])

    def _whole(self, name: str) -> tuple[str, int]:
        """The fused tensor that a tensor is a part of, and which of its rows comes first."""
        layer, part = name.rsplit(".", 1)
        whole, parts = next((whole, parts) for whole, parts in _FUSED.items() if part in parts)
        before = parts[: parts.index(part)]
        return f"{layer}.{whole}", sum(self._shapes[f"{layer}.{other}"][0] for other in before)
