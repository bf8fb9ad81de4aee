"""A model's memory, from its shape and the form of its file. Pure: all planning uses these functions.

weights    of the cpu backend: packed matrices and an embedding; of the reference backend: its element type
process    interpreter and libraries, and a tokenizer by the size of its vocabulary
a token    a key and a value of every layer and KV head that have some, in the type of the KV cache
a state    float32, of every layer that keeps one, for each running sequence
"""

import math
from collections.abc import Callable

from kvloom.checkpoints.families.mixers import Keyed, LatentAttention, Shapes
from kvloom.checkpoints.families.spec import PROJECTIONS, DecoderSpec
from kvloom.checkpoints.quantized.forms import BY_CHANNEL, FORM_BITS
from kvloom.checkpoints.windows import windowed
from kvloom.contract.config import EngineConfig

FormOf = Callable[[str], str]  # a tensor's name -> its form (numbers.FORM_BITS), "" when it is not quantised
STORED = "stored"  # the weight format that keeps quantised tensors unchanged
SMALL_WEIGHTS = 200_000_000  # of a model that takes at most 400 MB in bfloat16
UNQUANTISED_FORM = "int8"  # of all other matrices
_PACKED_BYTES = {"w8a8": 1 + 2 / 64, "w4a8": 0.5 + 4 / 32, "bf16": 2.0}  # of a packed weight, scales included
_EMBED_BYTES = 2  # bfloat16
_IN_FILE = ("layer_embed",)  # tables that stay in their file, of which a step reads the rows of its tokens
_ITEM_BYTES = {"bfloat16": 2, "bf16": 2, "int8": 1}  # else float32's 4
# Measured with vocabularies of 49,152, 151,936 and 262,144: 24 MiB with the cpu backend, 172 MiB with torch, and 560
# bytes a token; with a margin.
_PROCESS_BYTES = {"cpu": 40 << 20, "reference": 200 << 20}
_TOKENIZER_BYTES = 640  # of a token of the vocabulary
_SCALE_BYTES = {"cpu": 2, "reference": 4}  # of an int8 key or value


def weight_format(config: EngineConfig, spec: DecoderSpec, form_of: FormOf) -> str:
    """Weight format of the cpu backend.

    With "auto" a model of fewer than SMALL_WEIGHTS gets bfloat16, unless its file asks for activations in 8 bits, which
    tip the answers of so small a model (docs/decisions/weights.md). With "stored", and with "auto" for larger models, a
    quantised file keeps its own format, and any other gets 8 bits.
    """
    if config.weight_format not in ("auto", STORED):
        return config.weight_format
    forms = {form_of(name) for name in spec.tensor_shapes()} - {""}
    is_small = num_weights(spec) < SMALL_WEIGHTS and BY_CHANNEL not in forms
    if config.dtype == "bfloat16" or (is_small and config.weight_format == "auto"):
        return "bf16"
    return STORED if forms else "w8a8"


def kv_dtype(config: EngineConfig, backend: str) -> str:
    """Type of keys and values: "bf16", "int8" or "float32"."""
    if config.kv_dtype != "auto":
        return config.kv_dtype
    return "bf16" if backend == "cpu" or config.dtype == "bfloat16" else "float32"


def kv_head_bytes(kept: str, backend: str, head_dim: int) -> int:
    """Bytes of one token's key (or value) in one head, stored as kv_dtype says, scale included."""
    return head_dim * _ITEM_BYTES.get(kept, 4) + (_SCALE_BYTES[backend] if kept == "int8" else 0)


def kv_layer_bytes(kept: str, backend: str, mixer: Keyed) -> tuple[int, int]:
    """Bytes of one token's keys, and of its values, in a layer; 0 where values are a part of keys."""
    key, value = (kv_head_bytes(kept, backend, dim) for dim in (mixer.head_dim, mixer.value_dim))
    if isinstance(mixer, LatentAttention):
        return key, 0
    return mixer.num_kv_heads * key, mixer.num_kv_heads * value


def kv_token_bytes(config: EngineConfig, backend: str, spec: DecoderSpec) -> int:
    """Bytes of one token's keys and values in all layers and heads. `backend`: "cpu" or "reference"."""
    return sum(_cached_bytes(config, backend, spec).values())


def window_token_bytes(config: EngineConfig, backend: str, spec: DecoderSpec) -> int:
    """Of these, the bytes in layers that need a window's tokens only."""
    own = _cached_bytes(config, backend, spec)
    return sum(own[layer] for layer in windowed(spec))


def _cached_bytes(config: EngineConfig, backend: str, spec: DecoderSpec) -> dict[int, int]:
    """By layer."""
    kept = kv_dtype(config, backend)
    return {layer: sum(kv_layer_bytes(kept, backend, mixer)) for layer, mixer in spec.cached}


def state_bytes(spec: DecoderSpec) -> int:
    """Bytes of the state of one sequence, whatever its length; 0 = no layer keeps one."""
    return 4 * spec.state_floats


def weight_bytes(config: EngineConfig, backend: str, spec: DecoderSpec, form_of: FormOf) -> int:
    """Bytes of all weights once they are loaded."""
    if backend == "reference":
        return num_weights(spec) * _ITEM_BYTES.get(config.dtype, 4) + _projection_bytes(spec)
    kept = weight_format(config, spec, form_of)
    table = 0 if spec.joins_states or spec.assists else spec.vocab_size * spec.hidden
    if kept == STORED:
        shapes = {name: math.prod(shape) for name, shape in _held(spec).items() if len(shape) > 1}
        bits = sum(size * FORM_BITS[form_of(name) or UNQUANTISED_FORM] for name, size in shapes.items())
        own = 0 if form_of("embed") or not table else _unquantised_table(spec)
        return int(bits / 8) + own + _projection_bytes(spec)
    packed = num_weights(spec) - (0 if spec.tie_embeddings else table)  # the head is packed, the embedding is not
    return int(packed * _PACKED_BYTES[kept]) + table * _EMBED_BYTES + _projection_bytes(spec)


def _projection_bytes(spec: DecoderSpec) -> int:
    """Of an assistant's projections, which are float32."""
    return 3 * 4 * spec.hidden * spec.assists


def process_bytes(backend: str, vocab_size: int) -> int:
    """Bytes of a process that serves a model, without weights and KV cache, and without what it takes while it loads
    or computes.
    """
    return _PROCESS_BYTES[backend] + _TOKENIZER_BYTES * vocab_size


def _unquantised_table(spec: DecoderSpec) -> int:
    """Additional bytes of a bfloat16 embedding over an 8-bit one, which is the head's if they are tied."""
    form_bytes = 0 if spec.tie_embeddings else FORM_BITS[UNQUANTISED_FORM] / 8
    return int(spec.vocab_size * spec.hidden * (_EMBED_BYTES - form_bytes))


def num_weights(spec: DecoderSpec) -> int:
    """How many numbers all tensors of a model have that are held in memory."""
    return sum(math.prod(shape) for shape in _held(spec).values())


def _held(spec: DecoderSpec) -> Shapes:
    """The tensors that are held in memory by a backend."""
    elsewhere = (*_IN_FILE, *PROJECTIONS, *(("embed", "head") if spec.joins_states else ()))
    return {name: shape for name, shape in spec.tensor_shapes().items() if name not in elsewhere}
