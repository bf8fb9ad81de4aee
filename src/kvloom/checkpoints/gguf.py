"""GGUF files: metadata -> configuration, tensors as raw quantised rows."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvloom.checkpoints.gguf_types import GGUF_TYPES, GgufType
from kvloom.checkpoints.mapped import MappedFile
from kvloom.checkpoints.metadata import CONFIG_KEYS, Header, TensorInfo, read_header
from kvloom.checkpoints.quantized.blocks import KINDS as BLOCK_KINDS
from kvloom.checkpoints.quantized.blocks import form_of
from kvloom.checkpoints.quantized.numbers import Bytes
from kvloom.checkpoints.source import WIDE, RawTensor, as_rows, check_shape
from kvloom.checkpoints.unread import is_harmless
from kvloom.contract.errors import ModelError

KINDS = (*WIDE, *BLOCK_KINDS)
TOP_NAMES = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
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
}


_NO_NAMES: Mapping[str, str] = {}


def file_name(name: str, own: Mapping[str, str] = _NO_NAMES) -> str:
    """GGUF's name of a canonical tensor; `own`: names of a layer's tensors that differ."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, index, part = name.split(".")
    return f"blk.{index}.{own.get(part) or LAYER_NAMES[part]}"


def config_of(header: Header, file: str) -> tuple[str, dict[str, Any]]:
    """(architecture, configuration in Hugging Face's key names)."""
    metadata = header.metadata
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelError(f"{file}: metadata general.architecture is missing")
    config = {key: metadata.get(f"{arch}.{name}") for key, name in CONFIG_KEYS.items()}
    config = {key: value for key, value in config.items() if value is not None}
    if TOP_NAMES["embed"] not in header.tensors:
        raise ModelError(f"{file}: tensor {TOP_NAMES['embed']} is missing")
    config["vocab_size"] = header.tensors[TOP_NAMES["embed"]].shape[0]
    config["tie_word_embeddings"] = TOP_NAMES["head"] not in header.tensors
    config["use_sliding_window"] = "sliding_window" in config
    kind = metadata.get(f"{arch}.rope.scaling.type")
    config["rope_scaling"] = {
        "rope_type": "default" if kind in (None, "none") else kind,
        "factor": metadata.get(f"{arch}.rope.scaling.factor"),
        "original_max_position_embeddings": metadata.get(f"{arch}.rope.scaling.original_context_length"),
        "attention_factor": metadata.get(f"{arch}.rope.scaling.attn_factor"),
    }
    return arch, config


class GgufFile:
    """A mapped GGUF file: raw rows of any of its tensors, checked to lie within the file."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError when the file is no GGUF file or is cut short, naming the first tensor that is."""
        self.path, self.header = path, read_header(path, has_texts=False)
        self._mapped = MappedFile(path)
        for info in self.header.tensors.values():
            if info.offset + self._row_bytes(info) * math.prod(info.shape[:-1]) > self._mapped.num_bytes:
                raise ModelError(f"{path}: cut short: tensor {info.name} lies behind the end of the file")

    def kind(self, name: str) -> str:
        """The tensor's type, in lower case."""
        return _type_of(self.header.tensors[name], self.path).name.lower()

    def rows(self, name: str) -> Bytes:
        """uint8 [rows, bytes a row], a view; see MappedFile.part."""
        info = self.header.tensors[name]
        count = self._row_bytes(info) * math.prod(info.shape[:-1])
        return as_rows(self._mapped.part(info.offset, info.offset + count), info.shape)

    def _row_bytes(self, info: TensorInfo) -> int:
        _, block, size = _type_of(info, self.path)
        if not info.shape or info.shape[-1] % block:
            raise ModelError(
                f"{self.path}: tensor {info.name} of shape {list(info.shape)} does not fill blocks of {block}"
            )
        return info.shape[-1] // block * size


def _type_of(info: TensorInfo, path: Path) -> GgufType:
    try:
        return GGUF_TYPES[info.type]
    except KeyError:
        raise ModelError(f"{path}: tensor {info.name} has the unknown type {info.type}") from None


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
        heads: Mapping[str, int],
        names: Mapping[str, str] = _NO_NAMES,
    ) -> None:
        """shapes: adapted.file_shapes; heads: of the tensors ("q", "k") whose rows are in interleaved RoPE order;
        names: of a layer's tensors, where they are not LAYER_NAMES.
        """
        self._file, self._shapes, self._heads, self._names = file, shapes, heads, names
        for name, shape in self._shapes.items():
            key = file_name(name, names)
            if key not in file.header.tensors:
                raise ModelError(f"{file.path}: tensor {key} is missing")
            found = file.header.tensors[key].shape
            is_row = name.endswith("shared_router") and found == shape[1:]  # one row is a vector in these files
            check_shape(key, shape if is_row else found, shape, str(file.path))
            if file.kind(key) not in KINDS:
                known = ", ".join(kind.upper() for kind in KINDS)
                raise ModelError(f"{file.path}: tensor {key} is {file.kind(key).upper()}; known are {known}")

    def names(self) -> list[str]:
        return list(self._shapes)

    def unread(self) -> list[str]:
        """See SafetensorsSource."""
        read = {file_name(name, self._names) for name in self._shapes}
        return [key for key in self._file.header.tensors if key not in read and not is_harmless(key)]

    def form(self, name: str) -> str:
        return form_of(self._file.kind(file_name(name, self._names)))

    def tensor(self, name: str) -> RawTensor:
        """Raises ModelError when the spec has no such tensor."""
        if name not in self._shapes:
            raise ModelError(f"{self._file.path}: tensor {name} is not part of this model")
        key = file_name(name, self._names)
        data = self._file.rows(key)
        part = name.rsplit(".", 1)[-1]
        if part in self._heads:
            data = _neox_rows(data, self._heads[part])
        return RawTensor(name, self._shapes[name], self._file.kind(key), data)


def _neox_rows(data: Bytes, heads: int) -> Bytes:
    """Rows of each head from interleaved order (0, d/2, 1, d/2+1, ...) back to halves; whole rows move, bits stay."""
    rows = data.reshape(heads, -1, 2, data.shape[-1]).swapaxes(1, 2).reshape(data.shape)
    rows.flags.writeable = False
    return rows
