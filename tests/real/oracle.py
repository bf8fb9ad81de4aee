"""The real small model in transformers, read by the gguf package and nothing of ours.

Its results are cached in the user's cache by the file, the question and the versions of torch and transformers. The
model is loaded only for questions whose results are not cached.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers.initialization import no_init_weights

from tests.support.kept import kept

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


class Oracle:
    """Cached results of a model. `model` returns it when it is needed; `change` identifies changed weights."""

    def __init__(self, path: Path, model: Callable[[], Any], change: bytes = b"") -> None:
        self.model = model
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
        self._causes = [digest, Path(__file__).read_bytes(), change]
        self._causes += [version.encode() for version in (torch.__version__, transformers.__version__)]

    def likeliest(self, tokens: Sequence[int]) -> list[int]:
        """The most likely next token after each of these tokens."""
        return self._kept("likeliest", tokens, lambda model, ids: model(ids).logits[0].argmax(-1)).tolist()

    def states(self, tokens: Sequence[int]) -> torch.Tensor:
        """The output of the last norm for each token: [tokens, hidden], float32."""
        return self._kept("states", tokens, lambda model, ids: model.model(ids).last_hidden_state[0])

    def _kept(self, name: str, tokens: Sequence[int], ask: Callable[[Any, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        def make(path: Path) -> None:
            with torch.no_grad():
                torch.save(ask(self.model(), torch.tensor([[*tokens]])), path)

        return torch.load(kept([*self._causes, repr(tuple(tokens)).encode()], f"{name}.pt", make))
