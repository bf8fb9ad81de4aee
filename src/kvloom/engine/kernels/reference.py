"""The reference backend: plain torch on any device, the oracle of every other backend."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from kvloom.engine.models.spec import DecoderSpec
from kvloom.engine.weights.source import WeightSource


class ReferenceBackend:
    """Gather + SDPA over a paged cache `kv` [layers][k|v][blocks, block_size, kv_heads, head_dim].

    Each sequence runs through the model by itself, so its result is bit for bit independent of the other sequences in
    the step, and of which blocks hold its cache. It may depend in the last bits on how its prompt was cut into chunks.
    """

    name = "reference"

    def __init__(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        num_blocks: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        block_size: int = 16,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Loads tensor by tensor: peak memory is the weights plus one tensor. progress(done_bytes, total_bytes)."""
        self.spec, self.num_blocks, self.block_size = spec, num_blocks, block_size
        total = sum(torch.Size(shape).numel() for shape in spec.tensor_shapes().values()) * dtype.itemsize
        self.weight_bytes = 0
        self._w: dict[str, Tensor] = {}
        for name in weights.names():
            self._w[name] = weights.tensor(name).float32().to(device, dtype)
            self.weight_bytes += self._w[name].nbytes
            if progress:
                progress(self.weight_bytes, total)
        self._head = self._w["embed" if spec.tie_embeddings else "head"]
        self._inv_freq = torch.tensor(spec.rope.inv_freq, dtype=torch.float32, device=device)
        shape = (spec.num_layers, 2, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.kv_bytes = self.kv.nbytes
        self.kv_layout = f"reference-{self.kv.device.type}"

    def kv_layers(self) -> list[list[Tensor]]:
        """See kernels/backend.py."""
        return [list(layer) for layer in self.kv]

    @torch.inference_mode()
    def step(self, ids: Tensor, pos: Tensor, qstart: Tensor, block_table: Tensor, rows: Tensor) -> Tensor:
        """See kernels/backend.py."""
        device = self.kv.device
        ids, pos, table = (t.to(device, torch.int64) for t in (ids, pos, block_table))
        starts, wanted = qstart.tolist(), rows.tolist()
        logits = torch.empty(len(wanted), self.spec.vocab_size, dtype=torch.float32, device=device)
        for seq, (start, end) in enumerate(pairwise(starts)):
            if start == end:
                continue
            hidden = self._forward(ids[start:end], pos[start:end], table[seq])
            for place, row in enumerate(wanted):
                if start <= row < end:  # one row at a time: a logit does not depend on which others are asked for
                    logits[place] = F.linear(hidden[row - start : row - start + 1], self._head)[0].float()
        return logits

    def _forward(self, ids: Tensor, pos: Tensor, blocks: Tensor) -> Tensor:
        """One sequence: ids, pos [T], blocks [max_blocks] -> normed hidden states [T, hidden]."""
        spec = self.spec
        angles = torch.outer(pos.float(), self._inv_freq).repeat(1, 2)[:, None, :]
        factor = spec.rope.attention_factor
        cos, sin = ((f(angles) * factor).to(self.kv.dtype) for f in (torch.cos, torch.sin))
        x = self._w["embed"][ids]
        keys = torch.arange(int(pos[-1]) + 1, device=pos.device)
        mask = keys[None, :] <= pos[:, None]
        if spec.sliding_window is not None:
            mask &= keys[None, :] > pos[:, None] - spec.sliding_window
        slots = blocks[keys // self.block_size] * self.block_size + keys % self.block_size
        for layer in range(spec.num_layers):
            normed = self._norm(x, f"layers.{layer}.attn_norm")
            x = x + self._attend(layer, normed, cos, sin, slots, slots[pos], mask)
            x = x + self._mlp(layer, self._norm(x, f"layers.{layer}.mlp_norm"))
        return self._norm(x, "norm")

    def _attend(
        self, layer: int, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, own: Tensor, mask: Tensor
    ) -> Tensor:
        """Writes keys and values of x [T, hidden] to slots `own` [T], attends to `slots` [K] where mask [T, K]."""
        at = f"layers.{layer}."
        q, k, v = (self._heads(x, at + part) for part in "qkv")
        if self.spec.qk_norm:
            q, k = self._norm(q, at + "q_norm"), self._norm(k, at + "k_norm")
        cache = self.kv[layer].flatten(1, 2)  # [2, slots, kv_heads, head_dim]
        cache[0, own], cache[1, own] = _rotate(k, cos, sin), v
        key, value = (side[slots].transpose(0, 1)[None] for side in cache)
        query = _rotate(q, cos, sin).transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return F.linear(out[0].transpose(0, 1).flatten(1), self._w[at + "o"])

    def _heads(self, x: Tensor, name: str) -> Tensor:
        """A projection as [T, heads, head_dim]."""
        return F.linear(x, self._w[name], self._w.get(name + "_bias")).view(len(x), -1, self.spec.head_dim)

    def _mlp(self, layer: int, x: Tensor) -> Tensor:
        gate = F.linear(x, self._w[f"layers.{layer}.gate"])
        act = F.silu(gate) if self.spec.activation == "silu" else F.gelu(gate, approximate="tanh")
        return F.linear(act * F.linear(x, self._w[f"layers.{layer}.up"]), self._w[f"layers.{layer}.down"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm over the last dimension, statistics in float32."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.spec.norm_eps)
        return (wide * scale).to(x.dtype) * self._w[name]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, dim]; cos, sin [T, 1, dim]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
