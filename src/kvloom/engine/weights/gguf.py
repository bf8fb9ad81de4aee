"""GGUF files: metadata -> configuration, tensors as raw quantised rows."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from kvloom.engine.errors import ModelError
from kvloom.engine.models.spec import DecoderSpec
from kvloom.engine.weights.source import Bytes, RawTensor, as_rows, check_shape

KINDS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q4_k", "q5_k", "q6_k")
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
}
CONFIG_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
}


def file_name(name: str) -> str:
    """The name GGUF gives to a canonical tensor."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, index, part = name.split(".")
    return f"blk.{index}.{LAYER_NAMES[part]}"


def open_gguf(path: Path) -> gguf.GGUFReader:
    """Maps the file. Raises ModelError when it is no GGUF file or is cut short."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ModelError(f"{path}: not a GGUF file (it begins with {magic!r})")
        return gguf.GGUFReader(path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: damaged or cut short: {error}") from None


def value_of(reader: gguf.GGUFReader, key: str) -> Any:
    """A metadata value as plain Python, None where absent."""
    field = reader.get_field(key)
    return None if field is None else field.contents()


def config_of(reader: gguf.GGUFReader, file: str) -> tuple[str, dict[str, Any]]:
    """(architecture, configuration in Hugging Face's key names)."""
    arch = value_of(reader, "general.architecture")
    if not isinstance(arch, str):
        raise ModelError(f"{file}: metadata general.architecture is missing")
    config = {key: value_of(reader, f"{arch}.{name}") for key, name in CONFIG_KEYS.items()}
    config = {key: value for key, value in config.items() if value is not None}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if TOP_NAMES["embed"] not in tensors:
        raise ModelError(f"{file}: tensor {TOP_NAMES['embed']} is missing")
    config["vocab_size"] = int(tensors[TOP_NAMES["embed"]].shape[1])
    config["tie_word_embeddings"] = TOP_NAMES["head"] not in tensors
    config["use_sliding_window"] = "sliding_window" in config
    kind = value_of(reader, f"{arch}.rope.scaling.type")
    if kind not in (None, "none"):
        config["rope_scaling"] = {
            "rope_type": kind,
            "factor": value_of(reader, f"{arch}.rope.scaling.factor"),
            "original_max_position_embeddings": value_of(reader, f"{arch}.rope.scaling.original_context_length"),
            "attention_factor": value_of(reader, f"{arch}.rope.scaling.attn_factor"),
        }
    return arch, config


def frequency_factors(reader: gguf.GGUFReader, dim: int, file: str) -> list[float] | None:
    """Divisors of the rotary frequencies (Llama 3 scaling), dim/2 of them; None where the file has none."""
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            check_shape(tensor.name, tuple(int(n) for n in tensor.shape), (dim // 2,), file)
            return [float(value) for value in tensor.data]
    return None


class GgufSource:
    """Raw rows of a mapped GGUF file; the existence, shape and type of every tensor of `spec` is checked on opening."""

    def __init__(self, reader: gguf.GGUFReader, path: Path, spec: DecoderSpec, permuted: bool) -> None:
        self._path, self._spec, self._permuted = path, spec, permuted
        self._shapes = spec.tensor_shapes()
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        for name, shape in self._shapes.items():
            key = file_name(name)
            if key not in self._tensors:
                raise ModelError(f"{path}: tensor {key} is missing")
            tensor = self._tensors[key]
            check_shape(key, tuple(int(n) for n in reversed(tensor.shape)), shape, str(path))
            if tensor.tensor_type.name.lower() not in KINDS:
                known = ", ".join(kind.upper() for kind in KINDS)
                raise ModelError(f"{path}: tensor {key} is {tensor.tensor_type.name}; known are {known}")

    def names(self) -> list[str]:
        return list(self._shapes)

    def tensor(self, name: str) -> RawTensor:
        """Raises ModelError when the spec has no such tensor."""
        if name not in self._shapes:
            raise ModelError(f"{self._path}: tensor {name} is not part of this model")
        found, shape = self._tensors[file_name(name)], self._shapes[name]
        data = as_rows(np.ascontiguousarray(found.data).reshape(-1).view(np.uint8), shape)
        part = name.rsplit(".", 1)[-1]
        if self._permuted and part in ("q", "k"):
            data = _neox_rows(data, self._spec.num_heads if part == "q" else self._spec.num_kv_heads)
        return RawTensor(name, shape, found.tensor_type.name.lower(), data)


def _neox_rows(data: Bytes, heads: int) -> Bytes:
    """Rows of each head from interleaved order (0, d/2, 1, d/2+1, ...) back to halves; whole rows move, bits stay."""
    rows = data.reshape(heads, -1, 2, data.shape[-1]).swapaxes(1, 2).reshape(data.shape)
    rows.flags.writeable = False
    return rows
