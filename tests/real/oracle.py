"""The real small model in transformers, read by the gguf package and nothing of ours."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers.initialization import no_init_weights

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_oracle(path: Path) -> Any:
    """The same file in transformers, read by the gguf package and nothing of ours."""
    reader = gguf.GGUFReader(path)
    state = {}
    for tensor in reader.tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        values = np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32).reshape(shape)
        parts = tensor.name.split(".")
        if parts[-2] in ("attn_q", "attn_k"):  # rows 0, 32, 1, 33, ... of each head of 64
            values = values.reshape(-1, 32, 2, shape[1]).swapaxes(1, 2).reshape(shape)
        prefix = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
        state[f"{prefix}{NAMES[parts[-2]]}.weight"] = torch.from_numpy(np.array(values, order="C"))
    config = transformers.LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    with no_init_weights():
        model = transformers.LlamaForCausalLM(config).eval()
    model.tie_weights()
    missing = model.load_state_dict(state, strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["lm_head.weight"], [])
    return model
