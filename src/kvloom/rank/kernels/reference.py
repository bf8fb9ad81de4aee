"""The reference backend: plain torch on any device, the oracle of every other backend."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kvloom.checkpoints.families.mixers import Attention, LatentAttention, Recurrent, out_name
from kvloom.checkpoints.families.spec import PROJECTIONS, DecoderSpec
from kvloom.checkpoints.lora import AdapterFile
from kvloom.checkpoints.lora_tensors import pairs_of
from kvloom.checkpoints.source import WeightSource
from kvloom.contract.config import MAX_BATCH
from kvloom.contract.messages import Progress
from kvloom.rank.kernels.backend import Choices, Draw, Head, Ints, Ragged, most_likely
from kvloom.rank.kernels.file_table import LAYER_INPUTS, layer_table
from kvloom.rank.kernels.reference_cache import Context, KvCache
from kvloom.rank.kernels.reference_latents import latent_key, latent_output, latent_queries
from kvloom.rank.kernels.reference_math import attended, capped, gated, grown, mask_of, normed, rotate, routed, turns_of
from kvloom.rank.kernels.reference_mixers import MixerInput, mix
from kvloom.rank.parallel.mesh import Mesh
from kvloom.rank.parallel.shard import ShardedWeights, shard_pair, shard_spec

_ALONE = Mesh()


@dataclass(frozen=True, slots=True)
class ReferenceOptions:
    """Where and how the reference computes.

    `kv_dtype` of keys and values: None = dtype; torch.int8 has a scale for each token and head. With a `mesh` of
    several ranks each holds its share of heads and MLP channels; all must run the same steps.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    block_size: int = 16  # tokens a KV block
    mesh: Mesh = _ALONE
    num_states: int = MAX_BATCH  # sequences that may have a state at once, if layers keep one
    num_window_blocks: int = 0  # of Backend
    lender: "ReferenceBackend | None" = None  # whose tables a head that guesses shares, whose keys an assistant reads


@dataclass(frozen=True, slots=True)
class _Pair:
    """A LoraPair on the device."""

    a: Tensor
    b: Tensor
    scale: float


class ReferenceBackend:
    """Gather + SDPA over a paged cache: keys and values of a layer are [blocks, block_size, kv_heads, dim].

    Each sequence runs through the model by itself, so its result is bit for bit independent of the other sequences in
    the step, and of which blocks hold its cache. It may depend in the last bits on how its prompt was cut into chunks.
    """

    name = "reference"
    draw: Draw | None = None

    def __init__(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        num_blocks: int,
        options: ReferenceOptions | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Loads tensor by tensor: peak memory is the weights plus one tensor. progress(done_bytes, total_bytes).

        Raises ModelError when the ranks of a mesh cannot share the model.
        """
        options = options or ReferenceOptions()
        device, dtype, block_size = options.device, options.dtype, options.block_size
        self._mesh = options.mesh
        self.whole_spec, spec = spec, shard_spec(spec, self._mesh.world_size)
        shards = ShardedWeights(weights, self.whole_spec, self._mesh.rank, self._mesh.world_size)
        self.spec, self.num_blocks, self.block_size = spec, num_blocks, block_size
        total = sum(torch.Size(shape).numel() for shape in spec.tensor_shapes().values()) * dtype.itemsize
        self.weight_bytes = 0
        self._w: dict[str, Tensor] = {}
        self._table, lender = layer_table(spec, weights), options.lender
        for name in shards.names():
            if lender is not None and spec.joins_states and name in ("embed", "head"):
                self._w[name] = lender._w[name]
            if name in self._w or name in (LAYER_INPUTS, *PROJECTIONS):
                continue
            self._w[name] = torch.from_numpy(shards.float32(name)).to(device, dtype)
            self.weight_bytes += self._w[name].nbytes
            if progress:
                progress(self.weight_bytes, total)
        self._head = self._w.get("embed" if spec.tie_embeddings else "head", torch.empty(0))
        rows, kept = (num_blocks, block_size), options.kv_dtype or dtype
        self._device, self._kv = torch.device(device), KvCache(spec, rows, kept, device, options.num_window_blocks)
        self._cache = lender._kv if lender is not None and spec.assists else self._kv  # that steps read
        self.num_window_blocks, self._dtype = options.num_window_blocks, dtype
        self.kv_bytes = sum(part.nbytes for part in (*self.kv_parts, *self.window_parts))
        self.num_states = options.num_states if spec.state_floats else 0
        self.state_bytes = spec.state_floats * torch.float32.itemsize
        self._memory = torch.zeros((self.num_states, spec.state_floats), dtype=torch.float32, device=device)
        self.sequence_states = self._memory.view(torch.uint8)
        sizes = [mixer.state_floats for _, mixer in spec.recurrent]
        self._state_at = {layer: sum(sizes[:index]) for index, (layer, _) in enumerate(spec.recurrent)}
        self._adapters: dict[int, dict[str, _Pair]] = {}
        self._adapter: Mapping[str, _Pair] = {}  # adapter of the sequence that is computed
        self.held_as = f"in {str(dtype).removeprefix('torch.')}"
        self.kv_layout = f"reference-{device}-{dtype}-{self._kv.dtype}"

    @torch.inference_mode()
    def _run(self, batch: Ragged, wanted: list[int], kept: list[int]) -> tuple[Tensor, Tensor]:
        """Logits of the tokens `wanted`, states of the tokens `kept`."""
        device = self._device
        given = (batch.ids, batch.pos, batch.block_table, batch.block_table if batch.windows is None else batch.windows)
        ids, pos, *tables = (torch.tensor(array, dtype=torch.int64, device=device) for array in given)
        adapters, starts = batch.adapters, batch.qstart.tolist()
        logits = torch.empty(len(wanted), self.spec.vocab_size, dtype=torch.float32, device=device)
        states = torch.empty(len(kept), self.spec.hidden, dtype=torch.float32, device=device)
        for seq, (start, end) in enumerate(pairwise(starts)):
            if start == end:
                continue
            self._adapter = self._adapters[adapters[seq]] if adapters and adapters[seq] else {}
            types = None if batch.types is None else torch.from_numpy(batch.types[start:end]).to(device, torch.int64)
            state = self._state_of(batch, seq)
            shown = None if batch.states is None else torch.from_numpy(batch.states[start:end]).to(device, self._dtype)
            x = self._embedded(ids[start:end], pos[start:end], types, shown)
            inputs = self._layer_inputs(batch.ids[start:end], x)
            hidden = self._forward(x, inputs, (pos[start:end], *(table[seq] for table in tables)), state)
            for index, row in enumerate(wanted):
                # one row at a time, so that a logit does not depend on which others are asked for
                if start <= row < end:
                    own = F.linear(hidden[row - start : row - start + 1], self._head)[0].float()
                    logits[index] = capped(own * self.spec.logit_scale, self.spec.logit_softcap)
            mine = [index for index, row in enumerate(kept) if start <= row < end]
            states[mine] = hidden[[kept[index] - start for index in mine]].float()
        return logits, states

    def _state_of(self, batch: Ragged, seq: int) -> Tensor:
        """What layers keep of a sequence, [state_floats]; empty if they keep nothing."""
        if not self.num_states:
            return torch.empty(0)
        assert batch.places is not None, "sequences have states"
        return self._memory[int(batch.places[seq])]

    @property
    def kv_parts(self) -> tuple[Any, ...]:
        """See kernels/backend.py."""
        return tuple(part for layer in self.kv_layers for part in layer)

    @property
    def kv_layers(self) -> list[list[Any]]:
        """See kernels/backend.py."""
        return self._kv.layers(of_windows=False)

    @property
    def window_parts(self) -> tuple[Any, ...]:
        """See kernels/backend.py."""
        return tuple(part for layer in self.window_layers for part in layer)

    @property
    def window_layers(self) -> list[list[Any]]:
        """See kernels/backend.py."""
        return self._kv.layers(of_windows=True)

    def copy(self, target: Any, source: Any) -> None:
        """See kernels/backend.py."""
        torch.as_tensor(target).copy_(torch.as_tensor(source))

    def step(
        self, batch: Ragged, rows: Ints, tops: list[int], states: Ints | None = None, choices: Choices | None = None
    ) -> Head:
        """See kernels/backend.py. Never chooses tokens."""
        kept = [] if states is None else states.tolist()
        logits, found = (tensor.cpu().numpy() for tensor in self._run(batch, rows.tolist(), kept))
        values = np.empty((len(tops), max(tops, default=0)), np.float32)
        top_ids = np.empty(values.shape, np.int32)
        for row, top in enumerate(tops):
            if top:
                values[row, :top], top_ids[row, :top] = most_likely(logits[row], top)
        full = logits[[row for row, top in enumerate(tops) if not top]]
        return Head(tops, full, values, top_ids, found, np.empty(0, np.int32))

    def step_again(
        self, new_blocks: Sequence[tuple[int, int, int]], new_windows: Sequence[tuple[int, int, int]] = ()
    ) -> Ints:
        """See kernels/backend.py."""
        raise AssertionError("a step whose tokens it has chosen: it never chooses any")

    def add_adapter(self, id: int, adapter: AdapterFile) -> int:
        """See kernels/backend.py."""
        rank, world_size, device = self._mesh.rank, self._mesh.world_size, self._device
        pairs = {}
        for name, whole in pairs_of(adapter, self.whole_spec):
            part = shard_pair(name, whole, self.whole_spec, rank, world_size)
            a, b = (torch.from_numpy(side).to(device, self._dtype) for side in (part.a, part.b))
            pairs[name] = _Pair(a, b, part.scale)
        self._adapters[id] = pairs
        return sum(pair.a.nbytes + pair.b.nbytes for pair in pairs.values())

    def drop_adapter(self, id: int) -> None:
        """See kernels/backend.py."""
        self._adapters.pop(id, None)

    def _embedded(self, ids: Tensor, pos: Tensor, types: Tensor | None, given: Tensor | None) -> Tensor:
        """ids, pos, types [T] (types None = all 0), what is given of each -> input of the first layer [T, hidden]."""
        if self.spec.assists and given is not None:
            return given
        x, encoder = self._w["embed"][ids] * self.spec.embed_scale, self.spec.encoder
        if encoder is None:
            return x if given is None else self._joined(x, given)
        x = x + self._w["types"][torch.zeros_like(pos) if types is None else types]
        x = x + self._w["positions"][pos + encoder.first_position] if encoder.num_positions else x
        return self._norm(x, "embed_norm")

    def _joined(self, x: Tensor, states: Tensor) -> Tensor:
        """Embeddings and states [T, hidden] -> input of the first layer of a head that guesses."""
        pair = self._norm(x, "join_embed_norm"), self._norm(states, "join_state_norm")
        return F.linear(torch.cat(pair, -1), self._w["join"])

    def _layer_inputs(self, ids: Ints, x: Tensor) -> Tensor:
        """What each layer gets besides x [T, hidden]: [T, layers, size]; empty if there is nothing."""
        if self._table is None:
            return torch.empty(0)
        mixed = F.linear(x, self._w["layer_mix"]) * self.spec.hidden**-0.5
        found, shape = torch.from_numpy(self._table.rows(ids)).to(x.device, x.dtype), (len(x), self.spec.num_layers, -1)
        return (self._norm(mixed.view(shape), "layer_mix_norm") + found.view(shape)) * 2**-0.5

    def _forward(self, x: Tensor, inputs: Tensor, places: tuple[Tensor, ...], state: Tensor) -> Tensor:
        """One sequence: x [T, hidden], inputs [T, layers, size], positions [T], blocks and a window's blocks
        [max_blocks], state [state_floats] -> normed hidden states [T, hidden].
        """
        spec, (pos, blocks, windows) = self.spec, places
        keys = torch.arange(int(pos[-1]) + 1, device=pos.device)
        turns = {rope: turns_of(rope, pos + 1 if spec.assists else pos, self._dtype) for rope in spec.ropes}
        masks = {
            window: mask_of(keys, pos, window, spec.sees_ahead)
            for window in {mixer.window for _, mixer in spec.attention}
        }
        if pos[0] == 0:
            state.zero_()
        context = Context(turns, pos, self._cache.slots(blocks, windows, pos), masks, state)
        for layer, own in enumerate(spec.layers):
            at = f"layers.{layer}."
            if own.mixer is not None:
                x = self._branch(x, at + "attn", functools.partial(self._mixed, layer, context=context))
            if own.has_experts and spec.has_dense(layer):
                x = x + self._norm(self._both(at, x), at + "mlp_post_norm") * spec.residual_scale
            elif own.has_mlp:
                x = self._branch(x, at + "mlp", functools.partial(self._experts if own.has_experts else self._mlp, at))
            if spec.layer_inputs:
                added = gated(spec, self._linear(x, at + "input_gate"), inputs[:, layer])
                x = x + self._norm(self._linear(added, at + "input_out"), at + "input_post_norm")
            x = x * self._w[at + "scalar"] if spec.scales_layers else x
        return x if spec.encoder else self._norm(x, "norm")

    def _branch(self, x: Tensor, name: str, of: Callable[[Tensor], Tensor]) -> Tensor:
        """x [T, hidden] plus the output of a branch, which is normed before, behind or both."""
        if self.spec.norms == "sum":
            return self._norm(x + of(x), name + "_post_norm")
        branch = of(x if self.spec.norms == "post" else self._norm(x, name + "_norm"))
        if self.spec.norms != "pre":
            branch = self._norm(branch, name + "_post_norm")
        return x + branch * self.spec.residual_scale

    def _mixed(self, layer: int, x: Tensor, context: Context) -> Tensor:
        """The output of a layer's mixers for x [T, hidden]."""
        own = self.spec.layers[layer]
        if isinstance(own.mixer, Recurrent):
            return self._recur(layer, own.mixer, x, context)
        if isinstance(own.mixer, LatentAttention):
            return self._attend_latents(layer, own.mixer, x, context)
        out = self._attend(layer, x, context)
        return out if own.beside is None else out + self._recur(layer, own.beside, x, context)

    def _recur(self, layer: int, mixer: Recurrent, x: Tensor, context: Context) -> Tensor:
        """The output of a mixer with a state for x [T, hidden], which brings the state up to date."""
        at, first = f"layers.{layer}.", self._state_at[layer]
        memory = context.state[first : first + mixer.state_floats]
        given = MixerInput(
            lambda name, read: self._linear(x if read is None else read, at + name),
            lambda name: self._w[at + name],
            memory,
            self.spec.norm_eps,
        )
        return self._mesh.sum(self._linear(mix(mixer, given).to(x.dtype), at + out_name(mixer)))

    def _attend(self, layer: int, x: Tensor, context: Context) -> Tensor:
        """Write keys and values of x [T, hidden] to the cache, and return the attention output."""
        at = f"layers.{layer}."
        own = self.spec.layers[layer].mixer
        assert isinstance(own, Attention), "the layer has keys and values"
        q = self._heads(own, at + "q", self._linear(x, at + "q"), context)
        q = grown(self.spec, q, context.pos)
        read = layer if own.keys_of is None else own.keys_of
        slots = context.slots[read in self._cache.windowed]
        if own.keys_of is None:
            self._kv.write(layer, self._keys_and_values(layer, x, context), slots[context.pos])
        sinks, rules = self._w.get(at + "sinks"), (self.spec.attention_scale, self.spec.attention_softcap)
        cached = self._cache.read(read, slots, x.dtype)
        out = attended(q, cached, context.masks[own.window], sinks, rules).flatten(1)
        if own.is_gated:
            out = out * self._linear(x, at + "q_gate").sigmoid()
        out = self._mesh.sum(self._linear(out, at + "o", has_bias=False))
        return out + self._w[at + "o_bias"] if self.spec.o_bias else out

    def _attend_latents(self, layer: int, own: LatentAttention, x: Tensor, context: Context) -> Tensor:
        """As _attend, of a layer with latent attention."""
        at = f"layers.{layer}."
        turn = None if own.rope is None else context.turns[own.rope]
        down = self._linear(x, at + "kv_down")
        latent = self._norm(down[:, : own.kv_rank], at + "kv_down_norm")
        key = latent_key(latent, down[:, own.kv_rank :], turn)
        self._kv.write(layer, (key,), context.slots[0][context.pos])
        read = x if own.q_rank is None else self._norm(self._linear(x, at + "q_down"), at + "q_down_norm")
        q = latent_queries(own, self._linear(read, at + own.q_name), self._w[at + "k_up"], turn)
        q = grown(self.spec, q, context.pos)
        rules = (self.spec.attention_scale, 0.0)
        sums = attended(q, self._kv.read(layer, context.slots[0], x.dtype), context.masks[None], None, rules)
        out = latent_output(own, sums, self._w[at + "v_up"])
        return self._mesh.sum(self._linear(out, at + "o"))

    def _keys_and_values(self, layer: int, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """[T, kv_heads, dim] of x [T, hidden]."""
        own, at = self.spec.layers[layer].mixer, f"layers.{layer}."
        assert isinstance(own, Attention), "the layer has keys and values"
        k = self._linear(x, at + "k")
        v = (k if own.values_are_keys else self._linear(x, at + "v")).view(len(x), -1, own.value_dim)
        v = normed(v, self.spec.norm_eps).to(x.dtype) if self.spec.norms_values else v
        return self._heads(own, at + "k", k, context), v

    def _heads(self, own: Attention, name: str, x: Tensor, context: Context) -> Tensor:
        """Queries or keys x [T, channels], normed and rotated, [T, heads, head_dim]."""
        norm = self.spec.qk_norm
        x = (self._norm(x, name + "_norm") if norm == "row" else x).view(len(x), -1, own.head_dim)
        x = self._norm(x, name + "_norm") if norm == "head" else x
        x = x if own.rope is None else rotate(x, *context.turns[own.rope])
        return self._norm(x, name + "_norm") if norm == "rotated" else x

    def _linear(self, x: Tensor, name: str, has_bias: bool = True) -> Tensor:
        """x [T, in] -> [T, out], plus the contribution of the sequence's adapter."""
        y = F.linear(x, self._w[name], self._w.get(name + "_bias") if has_bias else None)
        pair = self._adapter.get(name)
        return y if pair is None else y + pair.scale * F.linear(F.linear(x, pair.a), pair.b)

    def _mlp(self, at: str, x: Tensor) -> Tensor:
        if self.spec.encoder and not self.spec.gates_mlps:
            return self._linear(F.gelu(self._linear(x, at + "up")), at + "down")
        return self._mesh.sum(self._linear(self._activated(at, x), at + "down"))

    def _activated(self, at: str, x: Tensor) -> Tensor:
        """Input of the down projection."""
        up = self._linear(x, at + "up")
        if self.spec.activation == "relu2":
            return F.relu(up).square()
        return gated(self.spec, self._linear(x, at + "gate"), up)

    def _both(self, at: str, x: Tensor) -> Tensor:
        """What MLP and experts together give for the residual stream x; see Experts.has_dense."""
        read = normed(x, self.spec.norm_eps) * self._w[at + "router_norm"].float() * self.spec.hidden**-0.5
        routed = self._experts(at, self._norm(x, at + "experts_norm"), read)
        dense = self._norm(self._mlp(at, self._norm(x, at + "mlp_norm")), at + "dense_post_norm")
        return dense + self._norm(routed, at + "experts_post_norm")

    def _experts(self, at: str, x: Tensor, read: Tensor | None = None) -> Tensor:
        """Weighted sum of each token's experts, in the order of their numbers. The router reads `read`; None = x."""
        experts = self.spec.experts
        assert experts is not None, "a layer has experts"
        bias = self._w.get(at + "router_bias")
        read = (x if read is None else read).float()
        logits = F.linear(read, self._w[at + "router"].float(), None if bias is None else bias.float())
        chosen, weights = routed(logits, experts, self._w.get(at + "router_correction"))
        out, added = torch.zeros_like(x), torch.zeros_like(x)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, picks = torch.where(chosen == expert)
            weight, one = weights[rows, picks, None].to(x.dtype), f"{at}experts.{expert}."
            out[rows] += weight * self._linear(self._activated(one, x[rows]), one + "down", has_bias=False)
            if experts.has_bias:
                added[rows] += weight * self._w[one + "down_bias"]
        if experts.shared:
            shared = self._linear(self._activated(at + "shared_", x), at + "shared_down")
            if experts.weighs_shared:
                shared *= torch.sigmoid(F.linear(x.float(), self._w[at + "shared_router"].float())).to(x.dtype)
            out += shared
        return self._mesh.sum(out) + added

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm or LayerNorm over the last dimension, statistics in float32."""
        wide = x.float()
        if self.spec.encoder:
            weight, bias = self._w[name].float(), self._w[name + "_bias"].float()
            return F.layer_norm(wide, wide.shape[-1:], weight, bias, self.spec.norm_eps).to(x.dtype)
        return normed(x, self.spec.norm_eps).to(x.dtype) * self._w[name]
