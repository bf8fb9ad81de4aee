"""Shapes of tiny models whose layers keep states, or have one branch, or two mixers."""

from kvloom.checkpoints.families.mixers import DeltaRule, KimiDelta, Mamba2, ShortConv
from kvloom.checkpoints.families.spec import Experts

from .specs import Plan, rope_of, tiny_spec

HYBRIDS = {
    "delta rule": tiny_spec(
        "qwen3_5",
        head_dim=64,
        qk_norm="head",
        layers=(
            Plan(None, recurrent=DeltaRule(2, 4, 32, 48, 4)),
            Plan(rope_of(32), is_gated=True),
            Plan(None, recurrent=DeltaRule(3, 6, 16, 80, 3, is_tiled=True)),  # behind the last attention
        ),
    ),
    "delta rule and experts": tiny_spec(
        "qwen3_next",
        hidden=96,
        head_dim=96,  # whose outputs are not quantised as soon as they are computed
        qk_norm="head",
        layers=(Plan(None, None, True, recurrent=DeltaRule(2, 2, 64, 64, 4)), Plan(rope_of(32), None, True, True)),
        experts=Experts(5, 2, 40, shared=72),
    ),
}


HYBRIDS |= {
    "delta rule with a decay of each channel": tiny_spec(
        "kimi_linear",
        layers=(
            Plan(None, recurrent=KimiDelta(2, 32, 4)),
            Plan(rope_of(32)),
            Plan(None, recurrent=KimiDelta(6, 16, 3)),
            Plan(None, recurrent=KimiDelta(2, 80, 2)),  # behind the last attention, wider than the residual stream
        ),
    ),
}


HYBRIDS |= {
    "short convolution": tiny_spec(
        "lfm2",
        hidden=288,  # more channels than a thread takes at once
        qk_norm="head",
        layers=(Plan(rope_of(32)), Plan(None, recurrent=ShortConv(288, 3)), Plan(None, recurrent=ShortConv(48, 5))),
    ),
}


HYBRIDS |= {
    "mamba2": tiny_spec(
        "granitehybrid",
        layers=(
            Plan(None, recurrent=Mamba2(4, 32, 48, 2, 4)),  # 320 channels, more than a thread takes at once
            Plan(rope_of(32)),
            Plan(None, recurrent=Mamba2(3, 16, 16, 1, 3, has_conv_bias=False, least_step=0.3, most_step=1.5)),
            Plan(None, recurrent=Mamba2(2, 48, 32, 1, 2, has_norm=False)),
        ),
    ),
}


HYBRIDS |= {
    "one branch a layer": tiny_spec(
        "nemotron_h",
        activation="relu2",
        layers=(
            Plan(None, branches="mlp"),
            Plan(None, None, True, branches="mlp"),
            Plan(None, recurrent=Mamba2(2, 32, 16, 1, 4), branches="mixer"),
            Plan(None, branches="mixer"),
            Plan(None, None, True, branches="mlp"),
        ),
        experts=Experts(6, 2, 40, shared=72, weighs_shared=False, scores="sigmoid", has_correction=True, scale=2.5),
    ),
    "two mixers a layer": tiny_spec(
        "falcon_h1",
        heads=2,
        kv_heads=1,
        head_dim=96,  # 384 rows above those of the other mixer
        layers=(
            Plan(rope_of(96), recurrent=Mamba2(3, 32, 16, 3, 4, has_norm=False), branches="three"),
            Plan(rope_of(96), recurrent=Mamba2(3, 32, 16, 1, 2), branches="three"),
        ),
    ),
}
