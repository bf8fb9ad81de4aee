"""Tiny random models of every family shape, and ragged steps over them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import gguf
import numpy as np
import torch

from kvloom.checkpoints.families.spec import DecoderSpec, Experts
from kvloom.checkpoints.gguf_types import GGUF_TYPES
from kvloom.checkpoints.quantized.layout import Scheme
from kvloom.checkpoints.quantized.packed import PackedMatrix, Part
from kvloom.checkpoints.source import RawTensor, Tensor
from kvloom.rank.kernels.backend import Backend, Head, Ints, Ragged

from .gemma4 import GEMMA4
from .hybrids import HYBRIDS
from .latents import LATENTS
from .specs import Plan, rope_of, tiny_spec

SPECS = {
    "llama": tiny_spec(),
    "llama, own head": tiny_spec(vocab=96),
    "smollm2 heads": tiny_spec(hidden=192, intermediate=200, heads=9, kv_heads=3, head_dim=64),
    "mistral": tiny_spec("mistral", heads=4, kv_heads=1, head_dim=96, layers=(Plan(rope_of(96), 37),) * 2),
    "qwen2": tiny_spec("qwen2", heads=14, kv_heads=2, head_dim=64, qkv_bias=True),
    "qwen3": tiny_spec("qwen3", heads=2, kv_heads=2, head_dim=128, qk_norm="head"),
    "gelu, uneven sizes": tiny_spec(
        "gemma", hidden=72, intermediate=100, activation="gelu_tanh", head_dim=256, heads=2
    ),
    "gemma2": tiny_spec(
        "gemma2",
        hidden=72,
        layers=(Plan(rope_of(32), 21), Plan(rope_of(32, 1e6, 1.1))),
        qk_norm="head",
        norms="both",
        activation="gelu_tanh",
        embed_scale=8.5,
        attention_scale=0.21,
        attention_softcap=2.0,
        logit_softcap=5.0,
    ),
    "olmo3": tiny_spec(
        "olmo", qk_norm="row", norms="post", head_dim=64, layers=(Plan(rope_of(64), 140), Plan(rope_of(64)))
    ),
    "granite with half of each head rotated": tiny_spec(
        "granite",
        head_dim=64,
        layers=(Plan(rope_of(32)), Plan(None)),
        embed_scale=3.0,
        residual_scale=0.4,
        attention_scale=0.1,
        logit_scale=0.25,
    ),
}


SPECS |= {
    "mixture of experts": tiny_spec(
        "mixtral",
        layers=(Plan(rope_of(32)), Plan(rope_of(32), has_experts=True)),  # an MLP narrower than the shared expert
        experts=Experts(5, 2, 40, shared=100),
    ),
    "gpt-oss": tiny_spec(
        "gpt-oss",
        hidden=72,
        layers=(Plan(rope_of(32), 21, has_experts=True), Plan(rope_of(32, 1e6, 1.1), has_experts=True)),
        activation="clamped",
        glu_limit=1.5,
        glu_alpha=1.7,
        qkv_bias=True,
        o_bias=True,
        has_sinks=True,
        residual_scale=0.8,
        experts=Experts(7, 3, 40, weighs_chosen=False, has_bias=True),
    ),
}


SPECS |= {
    "experts in groups": tiny_spec(
        "glm4_moe",
        layers=(Plan(rope_of(32)), Plan(rope_of(32), has_experts=True)),
        experts=Experts(
            8,
            3,
            40,
            shared=100,
            weighs_shared=False,
            scores="sigmoid",
            has_correction=True,
            groups=4,
            kept_groups=2,
            scale=1.5,
        ),
    ),
    "norms behind the rotation, queries that grow": tiny_spec(
        "hunyuan", qk_norm="rotated", query_growth=0.1, growth_unit=8
    ),
}


SPECS |= HYBRIDS | GEMMA4 | LATENTS


@dataclass
class MemoryWeights:
    """A WeightSource over float32 tensors. `blocks` replaces some of them by quantised tensors."""

    values: dict[str, torch.Tensor]
    blocks: Mapping[str, Tensor] = field(default_factory=dict)

    def names(self) -> list[str]:
        return list(self.values)

    def form(self, name: str) -> str:
        return self.blocks[name].form if name in self.blocks else ""

    def tensor(self, name: str) -> Tensor:
        if name in self.blocks:
            return self.blocks[name]
        value = self.values[name].contiguous()
        data = value.numpy().view("uint8").reshape(value.shape[0] if value.dim() > 1 else 1, -1)
        return RawTensor(name, tuple(value.shape), "f32", data)


def random_weights(spec: DecoderSpec, seed: int = 0) -> MemoryWeights:
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, shape in spec.tensor_shapes().items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm"):
            values[name] = 1 + 0.2 * noise
        elif name.endswith(".decay"):
            values[name] = -noise.exp()
        elif name.endswith("router_correction"):  # decides alone, for the same reason
            values[name] = noise * 3
        elif name.endswith(".router"):  # large, so that rounding changes no choice of experts
            is_small = spec.experts is not None and spec.experts.has_dense  # what it reads is divided by sqrt(hidden)
            values[name] = noise * 4 * (1 if is_small else shape[-1] ** -0.5)
        elif name.endswith(".scalar"):
            values[name] = 1 + 0.2 * noise
        else:
            values[name] = noise * (0.3 if len(shape) == 1 else shape[-1] ** -0.5)
    return MemoryWeights(values)


_HALVES = {"q4_1": 2, "q5_1": 2, "q2_k": 2, "q4_k": 2, "q5_k": 2}  # float16 scales of a block; 1 for other kinds
_SCALES_BEHIND = ("q2_k", "q3_k", "q6_k", "tq1_0", "tq2_0")  # kinds that have them at the end
_SPREAD = 2.0**-6


def random_blocks(name: str, shape: tuple[int, ...], kind: str) -> RawTensor:
    """Random blocks of `kind`, with scales that give the weights a standard deviation of about shape[-1] ** -0.5."""
    num_values, num_bytes = next(sizes for name, *sizes in GGUF_TYPES.values() if name == kind.upper())
    random = np.random.default_rng(len(name) + sum(shape))
    data = random.integers(0, 256, (shape[0], shape[1] // num_values * num_bytes), np.uint8)
    blocks = data.reshape(-1, num_bytes)

    def scale_by(factor: float) -> None:
        if kind == "mxfp4":
            blocks[:, 0] = 127 + round(math.log2(factor))
            return
        if kind == "nvfp4":
            blocks[:, :4] = (8 + round(math.log2(factor))) << 3  # half a power of two
            return
        if kind == "iq1_m":  # a nibble in each of four words
            half = np.array([factor], np.float16).view(np.uint16)
            words = blocks[:, 48:].view(np.uint16)
            words[:] = words & 0xFFF | half >> np.array([0, 4, 8, 12], np.uint16) << 12
            return
        count = _HALVES.get(kind, 1)
        first = num_bytes - 2 * count if kind in _SCALES_BEHIND else 0
        halves = np.array([factor, factor if kind.endswith("k") else -8 * factor][:count], np.float16)
        blocks[:, first : first + 2 * count] = halves.view(np.uint8)

    scale_by(_SPREAD)
    deviation = float(RawTensor(name, shape, kind, data).float32().std())
    scale_by(_SPREAD * shape[1] ** -0.5 / deviation)
    return RawTensor(name, shape, kind, data)


# A model with a tensor of every block kind. Gate and up of the first layer have different kinds.
MIXED = tiny_spec(hidden=256, intermediate=512, heads=4, kv_heads=2, head_dim=64)
MIXED_KINDS = {
    "embed": "q6_k",
    "layers.0.q": "q4_k",
    "layers.0.k": "q4_k",
    "layers.0.v": "q6_k",
    "layers.0.o": "iq4_nl",
    "layers.0.gate": "q5_k",
    "layers.0.up": "q4_k",
    "layers.0.down": "q8_0",
    "layers.1.q": "mxfp4",
    "layers.1.k": "q4_1",
    "layers.1.v": "q5_1",
    "layers.1.o": "q5_0",
    "layers.1.gate": "q4_0",
    "layers.1.up": "q4_0",
    "layers.1.down": "iq4_xs",
}


# The same with the kinds of one to three bits; down has one of four, as files have it.
THIN_KINDS = {
    "embed": "q2_k",
    "layers.0.q": "iq2_xs",
    "layers.0.k": "q3_k",
    "layers.0.v": "iq3_s",
    "layers.0.o": "iq1_m",
    "layers.0.gate": "iq2_s",
    "layers.0.up": "iq2_xxs",
    "layers.0.down": "q3_k",
    "layers.1.q": "iq3_xxs",
    "layers.1.k": "tq2_0",
    "layers.1.v": "tq1_0",
    "layers.1.o": "nvfp4",
    "layers.1.gate": "q2_k",
    "layers.1.up": "q2_k",
    "layers.1.down": "q2_0",
}
MIXTURES: Mapping[str, Mapping[str, str]] = {  # by what sets them apart: what mixed_weights is given
    "all": {},
    "some": {"embed": "", "layers.0.o": "", "layers.1.up": "q8_0"},
    "thin": THIN_KINDS,
    "one bit": {"layers.0.up": "q1_0", "layers.1.q": "iq1_s"},
}


def mixed_weights(**kinds: str) -> MemoryWeights:
    """Random weights of MIXED. `kinds` overrides MIXED_KINDS by tensor name; "" means float32."""
    weights = random_weights(MIXED)
    chosen = {**MIXED_KINDS, **kinds}
    blocks = {
        name: random_blocks(name, tuple(weights.values[name].shape), kind) for name, kind in chosen.items() if kind
    }
    return MemoryWeights(weights.values, blocks)


def four_bit(weights: MemoryWeights, kind: str) -> MemoryWeights:
    """The same model with its layers' matrices as a GGUF file of `kind` (q4_0, q4_1) holds them."""
    quantized = gguf.GGMLQuantizationType[kind.upper()]
    blocks = {}
    for name, value in weights.values.items():
        if name.startswith("layers.") and value.dim() == 2 and value.shape[1] % 32 == 0:
            blocks[name] = RawTensor(name, tuple(value.shape), kind, gguf.quants.quantize(value.numpy(), quantized))
    return MemoryWeights(weights.values, blocks)


def by_channel(weights: MemoryWeights, left: tuple[str, ...] = ()) -> MemoryWeights:
    """The same model as a compressed-tensors folder: 8-bit matrices in the layers, with a scale per channel, and
    activations with a scale per token.

    Matrices whose names end in one of `left` stay floats, as routers always do.
    """
    scheme = Scheme("bytes", 8, None, per_token=True)
    blocks: dict[str, Tensor] = {}
    for name, value in weights.values.items():
        if value.dim() == 2 and name.startswith("layers.") and not name.endswith((*left, "router")):
            scales = value.abs().amax(1, keepdim=True) / 127
            numbers = (value / scales).round().to(torch.int8).numpy().view(np.uint8)
            rows = Part("F32", tuple(scales.shape), scales.numpy().view(np.uint8))
            parts = {"weight": Part("I8", tuple(value.shape), numbers), "weight_scale": rows}
            blocks[name] = PackedMatrix(name, tuple(value.shape), scheme, parts)
    return MemoryWeights(weights.values, blocks)


MIXED_FILE = "a file of many kinds"


def model_in(name: str, weight_format: str) -> tuple[DecoderSpec, MemoryWeights, str]:
    """A model of SPECS, or MIXED_FILE, with its weights, and the backend's `weight_format` for them. "by channel": the
    folder of `by_channel`, as stored.
    """
    if name == MIXED_FILE:
        return MIXED, mixed_weights(), weight_format
    weights = random_weights(SPECS[name])
    if weight_format == "w4a8":
        weights = four_bit(weights, "q4_1")
    if weight_format == "by channel":
        return SPECS[name], by_channel(weights), "stored"
    return SPECS[name], weights, weight_format


def int32(values: list[int]) -> Ints:
    return np.array(values, np.int32)


def ragged(parts: list[tuple[list[int], int, list[int]]], adapters: Sequence[int] = ()) -> tuple[Ragged, Ints]:
    """Step arguments for sequences (tokens, position of the first, blocks), and the rows of all their tokens."""
    ids = [token for tokens, _, _ in parts for token in tokens]
    pos = [start + i for tokens, start, _ in parts for i in range(len(tokens))]
    qstart = [0]
    for tokens, _, _ in parts:
        qstart.append(qstart[-1] + len(tokens))
    width = max(len(blocks) for _, _, blocks in parts)
    table = np.array([blocks + [-1] * (width - len(blocks)) for _, _, blocks in parts], np.int32)
    places = int32([blocks[0] for _, _, blocks in parts])  # a sequence keeps its first block
    batch = Ragged(int32(ids), int32(pos), int32(qstart), table, adapters, places=places)
    return batch, int32(list(range(len(ids))))


def step(backend: Backend, batch: Ragged, rows: Ints, tops: list[int], states: Ints | None = None) -> Head:
    """The result of a step as torch tensors, for comparison with the reference. The next step may overwrite it."""
    head = backend.step(batch, rows, tops, states)
    arrays = (head.full, head.values, head.ids, head.states, head.tokens)
    return Head(tops, *map(torch.from_numpy, arrays))


def all_logits(backend: Backend, batch: Ragged, rows: Ints) -> torch.Tensor:
    """All logits of the tokens `rows`, [R, vocab]. The next step may overwrite them."""
    return torch.from_numpy(backend.step(batch, rows, [0] * len(rows)).full)
