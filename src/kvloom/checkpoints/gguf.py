"""GGUF files: metadata -> configuration, tensors as raw quantised rows."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvloom.checkpoints.families.expert_layers import Stacking
from kvloom.checkpoints.families.values import count
from kvloom.checkpoints.gguf_parts import open_parts
from kvloom.checkpoints.gguf_types import GGUF_TYPES
from kvloom.checkpoints.metadata import Header, config_keys
from kvloom.checkpoints.quantized.blocks import KINDS as BLOCK_KINDS
from kvloom.checkpoints.quantized.blocks import form_of
from kvloom.checkpoints.quantized.numbers import Bytes
from kvloom.checkpoints.source import WIDE, RawTensor, as_rows, check_shape, has_sizes
from kvloom.checkpoints.unread import is_harmless
from kvloom.contract.errors import ModelError

KINDS = (*WIDE, *BLOCK_KINDS)
TOP_NAMES = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "layer_embed": "per_layer_token_embd.weight",
    "layer_mix": "per_layer_model_proj.weight",
    "layer_mix_norm": "per_layer_proj_norm.weight",
}
LAYER_NAMES = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "qkv": "attn_qkv.weight",
    "gate_up": "ffn_up.weight",
    "attn_post_norm": "post_attention_norm.weight",
    "mlp_post_norm": "post_ffw_norm.weight",
    "o_bias": "attn_output.bias",
    "sinks": "attn_sinks.weight",
    "q_gated": "attn_q.weight",
    "conv_in": "attn_qkv.weight",
    "q_down": "attn_q_a.weight",
    "q_down_norm": "attn_q_a_norm.weight",
    "q_up": "attn_q_b.weight",
    "kv_down": "attn_kv_a_mqa.weight",
    "kv_down_norm": "attn_kv_a_norm.weight",
    "kv_up": "attn_kv_b.weight",
    "k_up": "attn_k_b.weight",
    "v_up": "attn_v_b.weight",
    "gate_in": "attn_gate.weight",
    "beta_in": "ssm_beta.weight",
    "decay_in": "ssm_alpha.weight",
    "ba": "ssm_ba.weight",
    "short_in": "shortconv.in_proj.weight",
    "conv": "ssm_conv1d.weight",
    "decay": "ssm_a",
    "decay_bias": "ssm_dt.bias",
    "out_norm": "ssm_norm.weight",
    "out": "ssm_out.weight",
    "mamba_in": "ssm_in.weight",
    "conv_bias": "ssm_conv1d.bias",
    "q_conv": "ssm_conv1d_q.weight",
    "k_conv": "ssm_conv1d_k.weight",
    "v_conv": "ssm_conv1d_v.weight",
    "decay_down": "ssm_f_a.weight",
    "decay_up": "ssm_f_b.weight",
    "out_gate_down": "ssm_g_a.weight",
    "out_gate_up": "ssm_g_b.weight",
    "skip": "ssm_d",
    "router": "ffn_gate_inp.weight",
    "router_bias": "ffn_gate_inp.bias",
    "gate_experts": "ffn_gate_exps.weight",
    "up_experts": "ffn_up_exps.weight",
    "down_experts": "ffn_down_exps.weight",
    "gate_experts_bias": "ffn_gate_exps.bias",
    "up_experts_bias": "ffn_up_exps.bias",
    "down_experts_bias": "ffn_down_exps.bias",
    "shared_gate": "ffn_gate_shexp.weight",
    "shared_up": "ffn_up_shexp.weight",
    "shared_down": "ffn_down_shexp.weight",
    "shared_router": "ffn_gate_inp_shexp.weight",
    "router_correction": "exp_probs_b.bias",
    "router_norm": "ffn_gate_inp.scale",
    "gate_up_experts": "ffn_gate_up_exps.weight",
    "experts_norm": "pre_ffw_norm_2.weight",
    "dense_post_norm": "post_ffw_norm_1.weight",
    "experts_post_norm": "post_ffw_norm_2.weight",
    "input_gate": "inp_gate.weight",
    "input_out": "proj.weight",
    "input_post_norm": "post_norm.weight",
    "scalar": "layer_output_scale.weight",
}
_TOLD_BY_TENSORS = {  # what a configuration of a folder says
    "attention_bias": "blk.0.attn_q.bias",
    "attention_out_bias": "blk.0.attn_output.bias",
    "use_qk_norm": "blk.0.attn_q_norm.weight",
}
_OWN_EXPERT = re.compile(r"blk\.\d+\.ffn_gate\.\d+\.weight")
_NO_NAMES: Mapping[str, str] = {}


def file_name(name: str, own: Mapping[str, str] = _NO_NAMES) -> str:
    """GGUF's name of a canonical tensor; `own`: names of a layer's tensors that differ, and "layers": of a layer."""
    if "." not in name:
        return own.get(name) or TOP_NAMES[name]
    _, index, part = name.split(".", 2)
    at = own.get("layers", "blk.{}").format(index)
    if part.startswith("experts."):
        _, expert, part = part.split(".")
        return f"{at}.{LAYER_NAMES[part].removesuffix('weight')}{expert}.weight"
    return f"{at}.{own.get(part) or LAYER_NAMES[part]}"


def stacking_of(header: Header) -> Stacking:
    """How a file holds experts; in files of 2023 and early 2024 each is a tensor of its own."""
    if any(name.endswith(LAYER_NAMES["gate_up_experts"]) for name in header.tensors):
        return "gate_up"
    return "" if any(_OWN_EXPERT.fullmatch(name) for name in header.tensors) else "parts"


def has_kv_up(header: Header) -> bool:
    """Whether latent attention has one matrix for keys and values, as in files before April 2025."""
    return any(name.endswith(LAYER_NAMES["kv_up"]) for name in header.tensors)


def config_of(header: Header, file: str) -> tuple[str, dict[str, Any]]:
    """(architecture, configuration in Hugging Face's key names)."""
    metadata = header.metadata
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelError(f"{file}: metadata general.architecture is missing")
    config = config_keys(arch, metadata)
    if TOP_NAMES["embed"] not in header.tensors:
        raise ModelError(f"{file}: tensor {TOP_NAMES['embed']} is missing")
    config["vocab_size"] = header.tensors[TOP_NAMES["embed"]].shape[0]
    config["tie_word_embeddings"] = TOP_NAMES["head"] not in header.tensors
    config["use_sliding_window"] = config.get("sliding_window") is not None
    config |= {key: name in header.tensors for key, name in _TOLD_BY_TENSORS.items()}
    config["rope_scaling"] = _rope_scaling(arch, metadata)
    if arch in ("bert", "nomic-bert"):
        config |= _unsaid_by_encoders(header)
    if arch == "gemma4":
        has = {part: {name for name in header.tensors if name.endswith(f".attn_{part}.weight")} for part in "kv"}
        config["attention_k_eq_v"] = len(has["v"]) < len(has["k"])
    config["mamba_conv_bias"] = any(name.endswith(LAYER_NAMES["conv_bias"]) for name in header.tensors)
    config["has_router_correction"] = any(name.endswith(LAYER_NAMES["router_correction"]) for name in header.tensors)
    config["mamba_rms_norm"] = any(name.endswith(LAYER_NAMES["out_norm"]) for name in header.tensors)
    if arch in ("granite", "granitemoe", "granitehybrid"):
        config |= _unsaid_by_granite(config, metadata.get(f"{arch}.rope.scaling.finetuned") is not False)
    return arch, config


def _unsaid_by_encoders(header: Header) -> dict[str, Any]:
    """Numbers of positions and of types of tokens: those of their tables, which files hold from the first in use on."""
    tables = {"max_position_embeddings": "position_embd.weight", "type_vocab_size": "token_types.weight"}
    return {key: header.tensors[name].shape[0] for key, name in tables.items() if name in header.tensors}


def _unsaid_by_granite(config: Mapping[str, Any], has_rope: bool) -> dict[str, Any]:
    """The usual attention scale where the file has none, and no rotary embedding where positions were not trained."""
    found: dict[str, Any] = {}
    if config.get("attention_multiplier") is None:
        heads, hidden = count(config, "num_attention_heads"), count(config, "hidden_size")
        found["attention_multiplier"] = count(config, "head_dim", hidden // heads) ** -0.5
    return found if has_rope else {**found, "no_rope_layers": [0] * count(config, "num_hidden_layers")}


def _rope_scaling(arch: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """As Hugging Face's configurations have it. A factor without a type is a linear one; a factor of 0 is none."""
    told = {name: metadata.get(f"{arch}.rope.scaling.{name}") for name in ("type", "factor", "attn_factor")}
    factor = told["factor"] or metadata.get(f"{arch}.rope.scale_linear") or None
    kind = told["type"] or ("linear" if factor else "none")
    log_factor = metadata.get(f"{arch}.rope.scaling.yarn_log_multiplier") or None
    return {
        "rope_type": "default" if kind == "none" or (kind == "linear" and factor is None) else kind,
        "factor": factor,
        "original_max_position_embeddings": metadata.get(f"{arch}.rope.scaling.original_context_length") or None,
        "attention_factor": told["attn_factor"],
        "beta_fast": metadata.get(f"{arch}.rope.scaling.yarn_beta_fast"),
        "beta_slow": metadata.get(f"{arch}.rope.scaling.yarn_beta_slow"),
        "mscale": None if log_factor is None else 1.0,
        "mscale_all_dim": log_factor,
        "llama_4_scaling_beta": metadata.get(f"{arch}.attention.temperature_scale") or None,
    }


class GgufFile:
    """A mapped GGUF file, or all parts of one: raw rows of any of its tensors, checked to lie within the file."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError when the file is no GGUF file or is cut short, naming the first tensor that is; or when it
        is not the first part of a model that is all there.
        """
        self.path = path
        parts = open_parts(path)
        self._part_of = {name: part for part in parts for name in part.header.tensors}
        tensors = {name: part.header.tensors[name] for name, part in self._part_of.items()}
        self.header = Header(parts[0].header.metadata, tensors)

    def kind(self, name: str) -> str:
        """The tensor's type, in lower case."""
        return GGUF_TYPES[self.header.tensors[name].type].name.lower()

    def rows(self, name: str) -> Bytes:
        """uint8 [rows, bytes a row], a view; see MappedFile.part."""
        info = self.header.tensors[name]
        return as_rows(self._part_of[name].data(info), info.shape)


def rope_factors(file: GgufFile) -> dict[str, Any]:
    """Divisors of rotary frequencies that are tensors of the file (Llama 3, LongRoPE), as keys of rope_scaling."""
    names = {"freq_factors": "rope_freqs", "long_factor": "rope_factors_long", "short_factor": "rope_factors_short"}
    found = {}
    for key, name in names.items():
        name += ".weight"
        if name not in file.header.tensors:
            continue
        if file.kind(name) != "f32":
            raise ModelError(f"{file.path}: tensor {name} is {file.kind(name).upper()}; F32 is known")
        found[key] = [float(value) for value in file.rows(name).view(np.float32).ravel()]
    return found | ({"rope_type": "longrope"} if "long_factor" in found else {})


class GgufSource:
    """Raw rows of a mapped GGUF file; that it has every tensor of `shapes`, of that shape, is checked on opening."""

    def __init__(
        self,
        file: GgufFile,
        shapes: Mapping[str, tuple[int, ...]],
        names: Mapping[str, str] = _NO_NAMES,
    ) -> None:
        """shapes: adapted.file_shapes; names: of a layer's tensors, where they are not LAYER_NAMES."""
        self._file, self._shapes, self._names = file, shapes, names
        self._keys = {file_name(name, names) for name in shapes}
        for name, shape in self._shapes.items():
            key = file_name(name, names)
            if key not in file.header.tensors:
                raise ModelError(f"{file.path}: tensor {key} is missing")
            found = file.header.tensors[key].shape
            # vectors are rows, columns or groups in these files, and one row is a vector; some have dimensions of 1
            is_vector = 1 in (len(shape), len(found)) and math.prod(found) == math.prod(shape)
            is_same = is_vector or has_sizes(found, shape)
            check_shape(key, shape if is_same else found, shape, str(file.path))
            if file.kind(key) not in KINDS:
                known = ", ".join(kind.upper() for kind in KINDS)
                raise ModelError(f"{file.path}: tensor {key} is {file.kind(key).upper()}; known are {known}")

    def names(self) -> list[str]:
        return list(self._shapes)

    def unread(self) -> list[str]:
        """See SafetensorsSource."""
        read = self._keys | {_scale_name(key) for key in self._keys}
        return [key for key in self._file.header.tensors if key not in read and not is_harmless(key)]

    def form(self, name: str) -> str:
        return form_of(self._file.kind(file_name(name, self._names)))

    def tensor(self, name: str) -> RawTensor:
        """Raises ModelError when the spec has no such tensor."""
        if name not in self._shapes:
            raise ModelError(f"{self._file.path}: tensor {name} is not part of this model")
        key = file_name(name, self._names)
        shape = self._shapes[name]
        return RawTensor(name, shape, self._file.kind(key), self._file.rows(key), self._factors(key, shape))

    def _factors(self, key: str, shape: tuple[int, ...]) -> tuple[float, ...]:
        """The numbers beside a tensor that llama.cpp multiplies its results by, as NVFP4 has them; of a stack one, or
        one for each matrix. Raises ModelError.
        """
        name, file = _scale_name(key), self._file
        if name not in file.header.tensors or name in self._keys:
            return (1.0,)
        found, counts = file.header.tensors[name].shape, {(1,), shape[:1]} if len(shape) > 2 else {(1,)}
        if found not in counts or file.kind(name) != "f32":
            wanted = " or ".join(str(list(count)) for count in sorted(counts))
            problem = f"is {file.kind(name).upper()} of shape {list(found)}, not F32 of {wanted}"
            raise ModelError(f"{file.path}: tensor {name} {problem}")
        return tuple(float(factor) for factor in file.rows(name).view(np.float32).ravel())


def _scale_name(key: str) -> str:
    return f"{key.removesuffix('.weight')}.scale" if key.endswith(".weight") else ""
