"""The one branch of each layer of Nemotron-H, and its sizes. GGUF files say by numbers of KV heads and widths of MLPs
what a layer has.
"""

from collections.abc import Mapping
from typing import Any

from kvloom.checkpoints.families.hybrid import FULL, LINEAR, own_keys
from kvloom.checkpoints.families.values import count

_LETTERS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}  # of hybrid_override_pattern
_KEYS = {"mamba_n_heads": "mamba_num_heads", "mamba_d_head": "mamba_head_dim", "mamba_d_state": "ssm_state_size"}
_KEYS |= {"shared_expert_intermediate_size": "moe_shared_expert_intermediate_size"}


def of_folder(config: Mapping[str, Any]) -> dict[str, Any]:
    found, pattern = own_keys(config, _KEYS), config.get("hybrid_override_pattern")
    kinds = config.get("layers_block_type") or config.get("layer_types")
    if not kinds and isinstance(pattern, str):
        kinds = [_LETTERS.get(letter, letter) for letter in pattern]
    heads, size = (count({**config, **found}, key) for key in ("mamba_n_heads", "mamba_d_head"))
    found["mamba_d_ssm"] = heads * size
    return found | _of_layers(kinds or [LINEAR, "moe", FULL, "mlp"], config.get("n_routed_experts"))


def of_gguf(config: Mapping[str, Any]) -> dict[str, Any]:
    layers, experts = count(config, "num_hidden_layers"), config.get("num_local_experts")
    recurrent, wide = (config.get(key) or [False] * layers for key in ("recurrent_layers", "mlp_layers"))
    mlp = "moe" if experts else "mlp"
    kinds = [mlp if width else LINEAR if own else FULL for own, width in zip(recurrent, wide, strict=True)]
    return {"rms_norm_eps": config.get("layer_norm_eps"), **_of_layers(kinds[:layers], experts)}


def _of_layers(kinds: Any, experts: Any) -> dict[str, Any]:
    layers = len(kinds) if isinstance(kinds, list) else 1
    own = {"num_hidden_layers": layers, "layer_types": kinds, "sliding_window": None, "no_rope_layers": [0] * layers}
    return own | {"num_local_experts": experts if layers and "moe" in kinds else 0}
