"""GGUF files with latent attention: most are called deepseek2, whatever their experts are."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvloom.checkpoints.families.expert_layers import Mixture
from kvloom.checkpoints.families.known.mistral import GROWTH_FIELDS
from kvloom.checkpoints.families.known.mistral4 import MISTRAL4
from kvloom.checkpoints.families.latents import latent_sizes
from kvloom.checkpoints.families.values import count, positive


def of_gguf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Files before April 2025 have the sizes of heads without absorption where others have those with it; all have a
    tenth of YaRN's factor.
    """
    rotated, scaling = count(config, "rotary_dim"), dict(config.get("rope_scaling") or {})
    if scaling.get("mscale_all_dim"):
        scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), 10 * positive(scaling, "mscale_all_dim", 0.1))
    sizes = {
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": count(config, "head_dim_mla", config.get("head_dim")) - rotated,
        "v_head_dim": config.get("value_dim_mla", config.get("value_dim")),
        "rope_scaling": scaling,
    }
    return sizes | latent_sizes({**config, **sizes})


MISTRAL4_GGUF = replace(MISTRAL4, defaults={"rope_own_fields": GROWTH_FIELDS}, translated=of_gguf)
DEEPSEEK_GGUF = replace(
    MISTRAL4_GGUF,
    name="deepseek2",
    mixture=Mixture(
        weighs_chosen=None, shared="plain", scores=None, has_correction=None, group_best=None, is_optional=True
    ),
)
