"""Keys and values of the reference backend: plain tensors, in blocks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvloom.checkpoints.families.mixers import Keyed, LatentAttention, Rope
from kvloom.checkpoints.families.spec import DecoderSpec
from kvloom.checkpoints.windows import reach_of, windowed


@dataclass(frozen=True, slots=True)
class Context:
    """One sequence in one step: T tokens are computed; K tokens are cached, these included."""

    turns: Mapping[Rope, tuple[Tensor, Tensor]]  # cos and sin [T, 1, dim]
    pos: Tensor  # [T]
    slots: tuple[Tensor, Tensor]  # [K] slots of all keys and values, and those in a window's blocks; see KvCache.slots
    masks: Mapping[int | None, Tensor]  # window -> [T, K] mask: which of them a token attends to
    state: Tensor  # [state_floats] of the sequence


class KvCache:
    """Of each layer that has some, keys and values [blocks, block_size, kv_heads, dim]; int8 ones have a scale for each
    head of a token. Latent attention has keys alone, whose first numbers are its values.
    """

    def __init__(
        self, spec: DecoderSpec, rows: tuple[int, int], dtype: torch.dtype, device: str, num_window_blocks: int = 0
    ) -> None:
        """`rows`: blocks, and tokens of each. num_window_blocks: of Backend."""
        self.dtype = dtype
        self.windowed: frozenset[int] = windowed(spec) if num_window_blocks else frozenset()
        self._reach, self._block_size = reach_of(spec), rows[1]
        of = {layer: (num_window_blocks, rows[1]) if layer in self.windowed else rows for layer, _ in spec.cached}
        shapes = {layer: [(*of[layer], own.num_kv_heads, dim) for dim in _sizes(own)] for layer, own in spec.cached}
        self._value_dims = {layer: own.value_dim for layer, own in spec.cached if isinstance(own, LatentAttention)}
        self._numbers = {
            layer: [torch.zeros(shape, dtype=self.dtype, device=device) for shape in both]
            for layer, both in shapes.items()
        }
        self._scales = {
            layer: [torch.zeros(shape[:-1], device=device) for shape in both]
            for layer, both in shapes.items()
            if self.dtype == torch.int8
        }

    def layers(self, of_windows: bool) -> list[list[Any]]:
        """See Backend.kv_layers, and window_layers."""
        parts = (
            [*numbers, *self._scales.get(layer, ())]
            for layer, numbers in self._numbers.items()
            if (layer in self.windowed) == of_windows
        )
        blocks = [[part.flatten(1).view(torch.uint8) for part in layer] for layer in parts]
        return [[part.numpy() if part.device.type == "cpu" else part for part in layer] for layer in blocks]

    def slots(self, blocks: Tensor, windows: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        """Where the keys and values up to the last of the tokens at `pos` [T] lie, [K] each: in a sequence's blocks
        [max_blocks], and in a window's blocks, where keys that no step reads have the slot of another one.
        """
        keys = torch.arange(int(pos[-1]) + 1, device=pos.device)
        near = keys.clamp_min(int(pos[0]) + 1 - self._reach) if self.windowed else keys
        size = self._block_size
        own, other = (table[at // size] * size + at % size for table, at in ((blocks, keys), (windows, near)))
        return own, other

    def write(self, layer: int, new: tuple[Tensor, ...], own: Tensor) -> None:
        """Keys, and values if the layer has some, `new` [T, kv_heads, dim] to the slots `own` [T]."""
        for side, values in enumerate(new):
            self._write(layer, side, values, own)

    def read(self, layer: int, slots: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Keys and values that `slots` [K] hold, [K, kv_heads, dim]."""
        if layer in self._value_dims:
            keys = self._read(layer, 0, slots, dtype)
            return [keys, keys[..., : self._value_dims[layer]]]
        return [self._read(layer, side, slots, dtype) for side in range(2)]

    def _write(self, layer: int, side: int, new: Tensor, own: Tensor) -> None:
        cache = self._numbers[layer][side].flatten(0, 1)
        if self.dtype != torch.int8:
            cache[own] = new.to(cache.dtype)
            return
        scale = (new.float().abs().amax(-1) / 127).clamp_min(1e-30)
        self._scales[layer][side].flatten(0, 1)[own] = scale
        cache[own] = (new.float() / scale[..., None]).round().to(torch.int8)

    def _read(self, layer: int, side: int, slots: Tensor, dtype: torch.dtype) -> Tensor:
        found = self._numbers[layer][side].flatten(0, 1)[slots]
        if self.dtype != torch.int8:
            return found.to(dtype)
        return (found.float() * self._scales[layer][side].flatten(0, 1)[slots][..., None]).to(dtype)


def _sizes(own: Keyed) -> tuple[int, ...]:
    """Numbers of a key, and of a value if there are such."""
    return (own.head_dim,) if isinstance(own, LatentAttention) else (own.head_dim, own.value_dim)
