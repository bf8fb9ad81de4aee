"""Kimi-Linear: delta attention in three of four layers, latent attention without positions in the others, and
DeepSeek-V3's experts.
"""

from dataclasses import replace

from kvloom.checkpoints.families.hybrid import LINEAR, kimi_delta
from kvloom.checkpoints.families.known.deepseek import DEEPSEEK_V3
from kvloom.checkpoints.families.known.kimi_config import DEFAULTS, kimi_folder, kimi_gguf
from kvloom.checkpoints.families.latents import latent_fields

_ATTENTION = {"beta_in": "b_proj.weight", "decay_down": "f_a_proj.weight", "decay_up": "f_b_proj.weight"}
_ATTENTION |= {"out_gate_down": "g_a_proj.weight", "out_gate_up": "g_b_proj.weight", "out_norm": "o_norm.weight"}
_ATTENTION |= {"decay": "A_log", "decay_bias": "dt_bias", **{f"{x}_conv": f"{x}_conv1d.weight" for x in "qkv"}}
_MLP = {"router": "gate.weight", "router_correction": "gate.e_score_correction_bias"}
_MLP |= {
    f"experts.{part}": f"experts.{{}}.{own}.weight" for part, own in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
_MLP |= {f"shared_{part}": f"shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")}

KIMI_LINEAR = replace(
    DEEPSEEK_V3,
    name="kimi_linear",
    interleaved=False,
    recurrent=kimi_delta,
    recurrent_kind=LINEAR,
    names={name: f"self_attn.{own}" for name, own in _ATTENTION.items()}
    | {name: f"block_sparse_moe.{own}" for name, own in _MLP.items()},
    defaults=DEFAULTS,
    translated=kimi_folder,
    fields=lambda config: {**latent_fields(config), "interleaved": False},
)
assert KIMI_LINEAR.mixture is not None
KIMI_LINEAR_GGUF = replace(
    KIMI_LINEAR, mixture=replace(KIMI_LINEAR.mixture, weighs_chosen=True), defaults={}, translated=kimi_gguf
)
