"""Experts of a configuration: their number, the number for each token, and the layers that have them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvloom.checkpoints.families.spec import Experts
from kvloom.checkpoints.families.values import count, flag, short
from kvloom.contract.errors import ModelError

Stacking = Literal["", "parts", "gate_up", "interleaved"]  # of experts in files, see experts.py
MOST_EXPERTS = 1 << 16  # bound for all layers together; a model of 61 layers has 384 in each
_COUNTS = ("num_local_experts", "num_experts")


@dataclass(frozen=True, slots=True)
class Mixture:
    """Properties of experts that a family fixes. `weighs_chosen`: see Experts; None = the value of norm_topk_prob."""

    weighs_chosen: bool | None = True
    has_bias: bool = False
    has_shared: bool = False
    is_optional: bool = False  # files of dense models may state 0 experts


def experts_of(config: Mapping[str, Any], mixture: Mixture, num_layers: int) -> Experts | None:
    """None for a dense model of a family that has both kinds. Raises ModelError that names the key."""
    key = next((key for key in _COUNTS if config.get(key) is not None), None)
    if mixture.is_optional and (key is None or config[key] == 0):
        return None
    if key is None:
        raise ModelError(f"configuration: {' or '.join(_COUNTS)} is missing")
    number, per_token = count(config, key), count(config, "num_experts_per_tok")
    if number * num_layers > MOST_EXPERTS:
        raise ModelError(f"configuration: {key} is {number} in each of {num_layers} layers, more than {MOST_EXPERTS}")
    if per_token > number:
        raise ModelError(f"configuration: num_experts_per_tok is {per_token}, more than the {number} of {key}")
    weighs = flag(config, "norm_topk_prob") if mixture.weighs_chosen is None else mixture.weighs_chosen
    size = count(config, "intermediate_size") if config.get("moe_intermediate_size") is None else 0
    return Experts(
        number,
        per_token,
        size or count(config, "moe_intermediate_size"),
        weighs,
        mixture.has_bias,
        count(config, "shared_expert_intermediate_size") if mixture.has_shared else 0,
    )


def sparse_layers(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Which layers have experts: all except mlp_only_layers and those between multiples of decoder_sparse_step."""
    dense, step = config.get("mlp_only_layers") or [], count(config, "decoder_sparse_step", 1)
    if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
        raise ModelError(f"configuration: mlp_only_layers must be a list of layers, got {short(dense)}")
    return [index not in dense and (index + 1) % step == 0 for index in range(num_layers)]
