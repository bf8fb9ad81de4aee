"""Shapes of tiny models as Gemma 4's."""

from kvloom.checkpoints.families.spec import Experts, LayerInputs

from .specs import Plan, rope_of, tiny_spec

LARGE_HEADS = {"head_dim": 64, "num_kv_heads": 1}
SWITCHES = {
    "qk_norm": "head",
    "norms": "both",
    "norms_values": True,
    "activation": "gelu_tanh",
    "embed_scale": 8.0,
    "attention_scale": 0.15,  # of random heads, whose products are larger than those of trained ones
    "scales_layers": True,
}
GEMMA4 = {
    "gemma4, shared keys and inputs of layers": tiny_spec(
        "gemma4",
        layers=(
            Plan(rope_of(32), 21),
            Plan(rope_of(64), own=LARGE_HEADS),
            Plan(rope_of(32), 21, own={"keys_of": 0}, intermediate=200),
            Plan(rope_of(64), own=LARGE_HEADS | {"keys_of": 1}, intermediate=200),
        ),
        layer_inputs=LayerInputs(32, 101),
        **SWITCHES,
    ),
    "gemma4, values from keys, experts beside an MLP": tiny_spec(
        "gemma4",
        hidden=72,
        layers=(
            Plan(rope_of(64), own=LARGE_HEADS | {"values_are_keys": True}),
            Plan(rope_of(32), 21, has_experts=True, own={"num_heads": 3, "num_kv_heads": 3}),
        ),
        experts=Experts(5, 2, 40, has_dense=True),
        logit_softcap=5.0,
        **SWITCHES,
    ),
}
