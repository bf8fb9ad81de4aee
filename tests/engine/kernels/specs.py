"""Shapes of tiny models, layer by layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, NamedTuple

from kvloom.checkpoints.families.mixers import Attention, Recurrent, Rope
from kvloom.checkpoints.families.spec import DecoderSpec, Layer


class Plan(NamedTuple):
    """A layer of tiny_spec, without the sizes that all its layers share."""

    rope: Rope | None
    window: int | None = None
    has_experts: bool = False
    is_gated: bool = False
    recurrent: Recurrent | None = None  # in place of attention
    branches: Literal["two", "mixer", "mlp", "three"] = "two"  # mixer, and attention beside it if three, and MLP
    own: Mapping[str, object] = {}  # fields of its attention that differ
    intermediate: int | None = None


def tiny_spec(
    family: str = "llama",
    *,
    hidden: int = 64,
    intermediate: int = 96,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    vocab: int = 101,
    layers: tuple[Plan, ...] = (),
    **switches: object,
) -> DecoderSpec:
    plans = layers or (Plan(rope_of(head_dim)),) * 2
    sizes = Attention(heads, kv_heads, head_dim)

    def layer(plan: Plan) -> Layer:
        attention = replace(sizes, rope=plan.rope, window=plan.window, is_gated=plan.is_gated, **plan.own)
        has_both, has_mixer = plan.branches == "three", plan.branches != "mlp"
        mixer = attention if has_both or plan.recurrent is None else plan.recurrent
        return Layer(
            mixer if has_mixer else None,
            plan.has_experts,
            plan.branches != "mixer",
            plan.recurrent if has_both else None,
            plan.intermediate,
        )

    return DecoderSpec(family, hidden, intermediate, vocab, 2048, tuple(map(layer, plans)), 1e-5, True, **switches)


def rope_of(dim: int, theta: float = 10000.0, factor: float = 1.0) -> Rope:
    return Rope(tuple(float(theta ** (-2 * i / dim)) for i in range(dim // 2)), factor)
