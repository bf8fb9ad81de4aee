"""Experts of a configuration: their number, the number for each token, and the layers that have them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvloom.checkpoints.families.spec import Experts
from kvloom.checkpoints.families.values import count, flag, positive, short
from kvloom.contract.errors import ModelError

Stacking = Literal["", "parts", "gate_up", "interleaved"]  # of experts in files, see experts.py
MOST_EXPERTS = 1 << 16  # bound for all layers together; a model of 61 layers has 384 in each
MOST_GROUPS = 64  # of a layer's experts
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_FUNCTIONS = {"softmax": 1, "sigmoid": 2}  # GGUF's numbers of scores
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


@dataclass(frozen=True, slots=True)
class Mixture:
    """Properties of experts that a family fixes; see Experts. `weighs_chosen`: None = the value of norm_topk_prob.
    `shared`: an MLP for all tokens, weighted by a sigmoid, or plain, as wide as the configuration's number of experts,
    or plain and of a size of its own. `scores`, `has_correction`: None = as the configuration (of a GGUF file) says.
    """

    weighs_chosen: bool | None = True
    has_bias: bool = False
    shared: Literal["", "weighted", "plain", "sized"] = ""
    scores: Literal["softmax", "sigmoid"] | None = "softmax"
    has_correction: bool | None = False
    group_best: Literal[1, 2] | None = 2  # None = 1 of softmax, 2 of sigmoids
    is_optional: bool = False  # files of dense models may state 0 experts
    has_dense: bool = False  # see Experts


def experts_of(config: Mapping[str, Any], mixture: Mixture, num_layers: int) -> Experts | None:
    """None for a dense model of a family that has both kinds. Raises ModelError that names the key."""
    key = next((key for key in _COUNTS if config.get(key) is not None), None)
    if mixture.is_optional and (key is None or config[key] == 0):
        return None
    if key is None:
        raise ModelError(f"configuration: {' or '.join(_COUNTS[:2])} is missing")
    number = count(config, key)
    of_token = "num_experts_per_tok" if config.get("moe_k") is None else "moe_k"
    per_token = count(config, of_token)
    if number * num_layers > MOST_EXPERTS:
        raise ModelError(f"configuration: {key} is {number} in each of {num_layers} layers, more than {MOST_EXPERTS}")
    if per_token > number:
        raise ModelError(f"configuration: {of_token} is {per_token}, more than the {number} of {key}")
    has_correction = mixture.has_correction
    if has_correction is None:
        has_correction = flag(config, "has_router_correction")
    scores = _scores(config, mixture.scores, has_correction)
    groups, kept = _groups(config, number, per_token)
    size = count(config, "intermediate_size") if config.get("moe_intermediate_size") is None else 0
    size = size or count(config, "moe_intermediate_size")
    return Experts(
        number,
        per_token,
        size,
        flag(config, "norm_topk_prob") if mixture.weighs_chosen is None else mixture.weighs_chosen,
        mixture.has_bias,
        _shared(config, mixture, size),
        weighs_shared=mixture.shared == "weighted",
        scores=scores,
        has_correction=has_correction,
        groups=groups,
        kept_groups=kept,
        group_best=mixture.group_best or (1 if scores == "softmax" else 2),
        scale=positive(config, "routed_scaling_factor", 1.0),
        has_dense=mixture.has_dense,
    )


def _scores(
    config: Mapping[str, Any], fixed: Literal["softmax", "sigmoid"] | None, has_correction: bool
) -> Literal["softmax", "sigmoid"]:
    """What logits become; `fixed`: by the family, None = by the file, older ones of which tell it by the correction."""
    function = config.get("expert_gating_func")
    if fixed is None and function in _FUNCTIONS.values():
        return "softmax" if function == _FUNCTIONS["softmax"] else "sigmoid"
    found = fixed or ("sigmoid" if has_correction else "softmax")
    if function is not None and function != _FUNCTIONS[found]:
        raise ModelError(f"configuration: expert_gating_func must be {_FUNCTIONS[found]}, got {short(function)}")
    return found


def _groups(config: Mapping[str, Any], number: int, per_token: int) -> tuple[int, int]:
    """How many groups the experts are in, and how many of these a token chooses from."""
    groups = count(config, "n_group", 1)
    kept = count(config, "topk_group", groups)
    if groups > MOST_GROUPS or number % groups or kept > groups:
        raise ModelError(
            f"configuration: {kept} (topk_group) of {groups} groups (n_group) of {number} experts cannot be"
        )
    if kept == groups:
        return 1, 1
    if number // groups < 2 or per_token > number // groups * kept:
        raise ModelError(f"configuration: n_group {groups} leaves too few of {number} experts for {per_token} a token")
    return groups, kept


def _shared(config: Mapping[str, Any], mixture: Mixture, size: int) -> int:
    """Channels of the MLP that all tokens pass; 0 = none."""
    own = "shared_expert_intermediate_size"
    if mixture.shared == "weighted" or (mixture.shared == "sized" and config.get(own)):
        return count(config, own)
    if mixture.shared == "sized":
        return 0
    key = next((key for key in _SHARED if config.get(key) is not None), None)
    if not mixture.shared or key is None or config[key] == 0:
        return 0
    return size * count(config, key)


def sparse_layers(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Which layers have experts: all except mlp_only_layers, those between multiples of a step, those before the first
    and those behind the last.
    """
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
        raise ModelError(f"configuration: mlp_only_layers must be a list of layers, got {short(dense)}")
    step = count(config, "decoder_sparse_step", count(config, "moe_layer_interval", 1))
    of_first = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
    first, last = (
        next((_index(config, key) for key in keys if config.get(key) is not None), otherwise)
        for keys, otherwise in ((of_first, 0), (("moe_layer_end_index",), -1))
    )
    end = num_layers if last < 0 else last + 1
    return [index not in dense and (index + 1) % step == 0 and first <= index < end for index in range(num_layers)]


def _index(config: Mapping[str, Any], key: str) -> int:
    """The number of a layer, or -1. Raises ModelError."""
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < -1:
        raise ModelError(f"configuration: {key} must be the number of a layer, got {short(value)}")
    return value
