"""Latent attention in files.

Folders and older GGUF files have k_up and v_up as one matrix `kv_up`: of each head the rows of its keys, then those of
its values. A mixer reads that of keys transposed, as newer GGUF files hold it: [heads, out, in].
"""

from dataclasses import replace

import numpy as np

from kvloom.checkpoints.families.mixers import LatentAttention, Shapes
from kvloom.checkpoints.families.spec import DecoderSpec
from kvloom.checkpoints.source import RawTensor, Tensor, WeightSource, as_rows
from kvloom.contract.errors import ModelError

_KV_UP = "kv_up"
_PARTS = (".k_up", ".v_up")


def latent_file_shapes(shapes: Shapes, spec: DecoderSpec, is_joined: bool) -> Shapes:
    """`shapes` as files have them: kv_up in place of k_up and v_up, or these as a stack of the heads."""
    found = dict(shapes)
    for layer, own in spec.attention:
        if not isinstance(own, LatentAttention):
            continue
        for part in _PARTS:
            rows, cols = found.pop(f"layers.{layer}{part}")
            if not is_joined:
                found[f"layers.{layer}{part}"] = own.num_heads, rows // own.num_heads, cols
        if is_joined:
            found[f"layers.{layer}.{_KV_UP}"] = own.num_heads * (own.nope_dim + own.out_dim), own.kv_rank
    return found


class LatentWeights:
    """A WeightSource over one that has the tensors of latent_file_shapes."""

    def __init__(self, source: WeightSource, spec: DecoderSpec, is_joined: bool) -> None:
        self._source, self._is_joined, self._shapes = source, is_joined, spec.tensor_shapes()
        self._mixers = {layer: own for layer, own in spec.attention if isinstance(own, LatentAttention)}

    def names(self) -> list[str]:
        return list(self._shapes)

    def form(self, name: str) -> str:
        """k_up and v_up that were one matrix are not quantised."""
        return "" if self._is_joined and name.endswith(_PARTS) else self._source.form(name)

    def tensor(self, name: str) -> Tensor:
        """Raises ModelError when the spec has no such tensor."""
        if not name.endswith(_PARTS):
            return self._source.tensor(name)
        if name not in self._shapes:
            raise ModelError(f"tensor {name} is not part of this model")
        if self._is_joined:
            return self._part(name)
        raw = self._source.tensor(name)
        assert isinstance(raw, RawTensor), "stacks are tensors of their own"
        return replace(raw, shape=self._shapes[name])

    def _part(self, name: str) -> Tensor:
        layer, part = name.rsplit(".", 1)
        own = self._mixers[int(layer.removeprefix("layers."))]
        heads = self._source.tensor(f"{layer}.{_KV_UP}").float32().reshape(own.num_heads, -1, own.kv_rank)
        values = heads[:, : own.nope_dim].swapaxes(1, 2) if part == "k_up" else heads[:, own.nope_dim :]
        found = np.ascontiguousarray(values).reshape(self._shapes[name])
        return RawTensor(name, found.shape, "f32", as_rows(found.view(np.uint8).reshape(-1), found.shape))
