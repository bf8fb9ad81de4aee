"""Hugging Face folders: config.json and safetensors, one file or many."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvloom.engine.errors import ModelError
from kvloom.engine.models.spec import DecoderSpec
from kvloom.engine.weights.source import RawTensor, as_rows, check_shape

KINDS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_PREFIX = "model."
TOP_NAMES = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}


def file_name(name: str) -> str:
    """The name a Hugging Face checkpoint gives to a canonical tensor."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, index, part = name.split(".")
    return f"model.layers.{index}.{LAYER_NAMES[part]}"


def read_json(path: Path) -> dict[str, Any]:
    """Raises ModelError when the file is absent or holds no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; a model folder needs it") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds no JSON object")
    return value


class SafetensorsSource:
    """Maps the files of a folder; the existence and shape of every tensor of `spec` is checked on opening."""

    def __init__(self, folder: Path, spec: DecoderSpec) -> None:
        self._shapes = spec.tensor_shapes()
        self._files: dict[str, Any] = {}  # tensor name of the file -> open safetensors file
        self._paths: dict[str, Path] = {}
        for path in _weight_files(folder):
            try:
                handle = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path}: damaged or cut short: {error}") from None
            for key in handle.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118, no mapping
                self._files[key], self._paths[key] = handle, path
        bare = file_name("embed").removeprefix(_PREFIX)  # as sentence-transformers saves a decoder
        self._prefix = "" if bare in self._files else _PREFIX
        for name, shape in self._shapes.items():
            key = self._key(name)
            if key not in self._files:
                raise ModelError(f"{folder}: tensor {key} is missing")
            check_shape(key, tuple(self._files[key].get_slice(key).get_shape()), shape, str(self._paths[key]))

    def names(self) -> list[str]:
        return list(self._shapes)

    def _key(self, name: str) -> str:
        """The tensor's name in these files."""
        key = file_name(name)
        return self._prefix + key.removeprefix(_PREFIX) if key.startswith(_PREFIX) else key

    def tensor(self, name: str) -> RawTensor:
        """Raises ModelError when the spec has no such tensor or its type is not a floating one."""
        if name not in self._shapes:
            raise ModelError(f"tensor {name} is not part of this model")
        key = self._key(name)
        value = self._files[key].get_tensor(key).contiguous()
        if value.dtype not in KINDS:
            raise ModelError(f"{self._paths[key]}: tensor {key} is {value.dtype}; known are F32, F16 and BF16")
        data = value.reshape(-1).view(torch.uint8).numpy()
        return RawTensor(name, self._shapes[name], KINDS[value.dtype], as_rows(data, self._shapes[name]))


def stop_ids(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """End-of-sequence ids: generation_config.json over config.json; either holds one id or a list."""
    path = folder / "generation_config.json"
    value = (read_json(path) if path.exists() else {}).get("eos_token_id", config.get("eos_token_id"))
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) for i in ids):
        raise ModelError(f"{folder}: eos_token_id must be a token id or a list of them, got {value!r}")
    return frozenset(ids)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise ModelError(f"{index}: weight_map must map tensor names to files")
        files = sorted({folder / Path(f).name for f in weight_map.values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files and (any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))):
        raise ModelError(f"{folder}: holds only pickle weights (.bin), which are never opened; convert to safetensors")
    if not files:
        raise ModelError(f"{folder}: holds no .safetensors file")
    for path in files:
        if not path.exists():
            raise ModelError(f"{path}: no such file, though {index.name} names it")
    return files
