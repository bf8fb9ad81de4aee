"""What a model takes of memory, from its shape alone. Pure: whoever plans, here or elsewhere, asks these functions.

weights    of the cpu backend: packed matrices and a bfloat16 embedding; of the reference backend: its element type
a token    a key and a value of every layer and KV head, in the type of the KV cache
"""

import math

from kvloom.checkpoints.families.spec import DecoderSpec
from kvloom.contract.config import EngineConfig

_PACKED_BYTES = {"w8a8": 1 + 2 / 64, "w4a8": 0.5 + 4 / 32, "bf16": 2.0}  # of a packed weight, scales included
_EMBED_BYTES = 2  # bfloat16
_ITEM_BYTES = {"bfloat16": 2, "bf16": 2, "int8": 1}  # else float32's 4
_SCALE_BYTES = {"cpu": 2, "reference": 4}  # of an int8 key or value


def weight_format(config: EngineConfig) -> str:
    """Of the cpu backend."""
    if config.weight_format != "auto":
        return config.weight_format
    return "bf16" if config.dtype == "bfloat16" else "w8a8"


def kv_dtype(config: EngineConfig, backend: str) -> str:
    """Of keys and values: "bf16", "int8" or "float32"."""
    if config.kv_dtype != "auto":
        return config.kv_dtype
    return "bf16" if backend == "cpu" or config.dtype == "bfloat16" else "float32"


def kv_head_bytes(kept: str, backend: str, head_dim: int) -> int:
    """Of one token's key (or value) of one head, kept as kv_dtype says; its scale included."""
    return head_dim * _ITEM_BYTES.get(kept, 4) + (_SCALE_BYTES[backend] if kept == "int8" else 0)


def kv_token_bytes(config: EngineConfig, backend: str, spec: DecoderSpec) -> int:
    """Of one token's keys and values, all layers and heads. `backend`: "cpu" or "reference"."""
    head_bytes = kv_head_bytes(kv_dtype(config, backend), backend, spec.head_dim)
    return 2 * spec.num_layers * spec.num_kv_heads * head_bytes


def weight_bytes(config: EngineConfig, backend: str, spec: DecoderSpec) -> int:
    """Of all weights once they are loaded."""
    if backend == "reference":
        return _num_weights(spec) * _ITEM_BYTES.get(config.dtype, 4)
    table = spec.vocab_size * spec.hidden
    packed = _num_weights(spec) - (0 if spec.tie_embeddings else table)  # the head is packed, the embedding is not
    return int(packed * _PACKED_BYTES[weight_format(config)]) + table * _EMBED_BYTES


def _num_weights(spec: DecoderSpec) -> int:
    return sum(math.prod(shape) for shape in spec.tensor_shapes().values())
