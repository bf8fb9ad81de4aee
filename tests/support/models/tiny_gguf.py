"""A model with the demo model's tokenizer over two thin random layers, which needs a hundredth of its time."""

from pathlib import Path

import gguf
import numpy as np

LAYERS, HIDDEN, HEADS, KV_HEADS, INTERMEDIATE = 2, 64, 2, 1, 96  # heads of 32
KIND = gguf.GGMLQuantizationType.Q4_1  # as in the demo file
SIZES = {
    "block_count": LAYERS,
    "embedding_length": HIDDEN,
    "feed_forward_length": INTERMEDIATE,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "rope.dimension_count": HIDDEN // HEADS,
}
MATRICES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    "attn_v": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INTERMEDIATE, HIDDEN),
    "ffn_up": (INTERMEDIATE, HIDDEN),
    "ffn_down": (HIDDEN, INTERMEDIATE),
}


def make_tiny_gguf(demo: Path, path: Path) -> Path:
    """Writes the model to `path`. Tokenizer, chat template and context length are those of the file `demo`."""
    reader, dice = gguf.GGUFReader(demo), np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kinds = field.types
        value = SIZES.get(name.removeprefix("llama."), field.contents())
        writer.add_key_value(name, value, kinds[0], kinds[-1] if kinds[0] is gguf.GGUFValueType.ARRAY else None)
    vocab_size = len(reader.fields["tokenizer.ggml.tokens"].data)

    def add(name: str, *shape: int) -> None:
        values = dice.standard_normal(shape, dtype=np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, KIND), raw_dtype=KIND)

    add("token_embd", vocab_size, HIDDEN)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(HIDDEN, np.float32))
        for name, shape in MATRICES.items():
            add(f"blk.{layer}.{name}", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
