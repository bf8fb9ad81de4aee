"""Shapes of tiny models with latent attention."""

from dataclasses import replace

from kvloom.checkpoints.families.mixers import LatentAttention
from kvloom.checkpoints.families.spec import DecoderSpec, Experts

from .specs import Plan, rope_of, tiny_spec


def latent_spec(*mixers: LatentAttention, has_experts: tuple[bool, ...], **switches: object) -> DecoderSpec:
    """A model whose layers have these mixers; random heads have larger products than trained ones."""
    plans = tuple(Plan(None, has_experts=own) for own in has_experts)
    spec = tiny_spec("deepseek_v3", layers=plans, attention_scale=0.08, **switches)
    return replace(
        spec, layers=tuple(replace(layer, mixer=own) for layer, own in zip(spec.layers, mixers, strict=True))
    )


LATENTS = {
    "latents, of queries too": latent_spec(
        LatentAttention(4, 64, 32, 32, 32, 64, rope_of(32)),
        LatentAttention(3, 96, 24, 64, 64, 32, rope_of(64)),
        has_experts=(False, False),
    ),
    "latents without positions": latent_spec(
        LatentAttention(4, 64, 32, 32, 32, 64),
        LatentAttention(2, 64, 40, 64, 32, None),
        has_experts=(False, False),
    ),
    "latents, experts, queries that grow": latent_spec(
        LatentAttention(5, 64, 40, 32, 32, None, rope_of(32)),
        LatentAttention(5, 64, 40, 32, 32, None, rope_of(32)),
        has_experts=(False, True),
        hidden=72,
        query_growth=0.1,
        growth_unit=8,
        experts=Experts(
            8, 3, 40, shared=100, weighs_shared=False, weighs_chosen=False, groups=4, kept_groups=2, group_best=1
        ),
    ),
}
