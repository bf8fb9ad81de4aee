"""A random model of the shape of Qwen3.5-0.8B, in Q8_0, over the demo model's vocabulary: 24 layers, every fourth with
attention, the others with the gated delta rule.

Tokens that are no whole text have zeros for their logits, so that a greedy answer has none: some servers tell such
tokens only with the text that completes them.
"""

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

ARCH = "qwen35"
LAYERS, EVERY, HIDDEN, INTERMEDIATE = 24, 4, 1024, 3584
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 256
STATE_HEADS, STATE_DIM, WIDTH = 16, 128, 4
INNER = STATE_HEADS * STATE_DIM
KIND = gguf.GGMLQuantizationType.Q8_0
SIZES = {
    "block_count": LAYERS,
    "context_length": 32768,
    "embedding_length": HIDDEN,
    "feed_forward_length": INTERMEDIATE,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "full_attention_interval": EVERY,
    "rope.dimension_count": HEAD_DIM // 4,
    "ssm.conv_kernel": WIDTH,
    "ssm.state_size": STATE_DIM,
    "ssm.group_count": STATE_HEADS,
    "ssm.time_step_rank": STATE_HEADS,
    "ssm.inner_size": INNER,
}
MLP = {"ffn_gate": (INTERMEDIATE, HIDDEN), "ffn_up": (INTERMEDIATE, HIDDEN), "ffn_down": (HIDDEN, INTERMEDIATE)}
ATTENTION = {
    "attn_q": (2 * HEADS * HEAD_DIM, HIDDEN),  # and the gate of the output
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
}
DELTA = {
    "attn_qkv": (3 * INNER, HIDDEN),
    "attn_gate": (INNER, HIDDEN),
    "ssm_beta": (STATE_HEADS, HIDDEN),
    "ssm_alpha": (STATE_HEADS, HIDDEN),
    "ssm_out": (HIDDEN, INNER),
}
_KEPT = "tokenizer."  # of the demo file's metadata


def make_hybrid_gguf(demo: Path, path: Path) -> Path:
    """Writes the model to `path`; its tokenizer is that of the file `demo`."""
    reader = gguf.GGUFReader(demo)
    writer = gguf.GGUFWriter(path, ARCH)
    for name, field in reader.fields.items():
        if name.startswith(_KEPT):
            kinds = field.types
            value = field.contents()
            writer.add_key_value(name, value, kinds[0], kinds[-1] if kinds[0] is gguf.GGUFValueType.ARRAY else None)
    for name, size in SIZES.items():
        writer.add_uint32(f"{ARCH}.{name}", size)
    writer.add_array(f"{ARCH}.rope.dimension_sections", [11, 11, 10, 0])
    writer.add_float32(f"{ARCH}.rope.freq_base", 1e7)
    writer.add_float32(f"{ARCH}.attention.layer_norm_rms_epsilon", 1e-6)
    for name, values in _tensors(_whole(reader.fields["tokenizer.ggml.tokens"].contents())):
        if values.ndim == 2 and values.shape[1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(values, KIND), raw_dtype=KIND)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _whole(tokens: list[str]) -> list[bool]:
    """Whether each token is text by itself: of letters that its vocabulary writes as themselves, or a space."""
    return [all(letter.isascii() or letter == "Ġ" for letter in token) and "<|" not in token for token in tokens]


def _tensors(is_whole: list[bool]) -> Iterator[tuple[str, np.ndarray]]:
    dice = np.random.default_rng(0)

    def drawn(*shape: int) -> np.ndarray:
        return dice.standard_normal(shape, dtype=np.float32) * np.float32(shape[-1] ** -0.5)

    yield "token_embd.weight", drawn(len(is_whole), HIDDEN) * np.array(is_whole, np.float32)[:, None]
    yield "output_norm.weight", np.ones(HIDDEN, np.float32)
    for layer in range(LAYERS):
        has_keys = layer % EVERY == EVERY - 1
        matrices, ones = MLP | (ATTENTION if has_keys else DELTA), {"attn_norm": HIDDEN, "post_attention_norm": HIDDEN}
        ones |= {"attn_q_norm": HEAD_DIM, "attn_k_norm": HEAD_DIM} if has_keys else {"ssm_norm": STATE_DIM}
        for name, shape in matrices.items():
            yield f"blk.{layer}.{name}.weight", drawn(*shape)
        for name, size in ones.items():
            yield f"blk.{layer}.{name}.weight", np.ones(size, np.float32)
        if not has_keys:
            yield f"blk.{layer}.ssm_conv1d.weight", drawn(3 * INNER, WIDTH)
            yield f"blk.{layer}.ssm_a", -np.exp(dice.uniform(0, 2.7, STATE_HEADS)).astype(np.float32)
            yield f"blk.{layer}.ssm_dt.bias", dice.uniform(-6, -2, STATE_HEADS).astype(np.float32)
