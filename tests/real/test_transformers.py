"""The real small model: greedy answers of the engine are those of transformers in fp32."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from kvloom.engine.config import EngineConfig
from kvloom.engine.engine import Engine
from kvloom.engine.executor import InProcessExecutor
from kvloom.engine.request import Request, SamplingParams
from kvloom.engine.runner import open_runner
from kvloom.engine.tokenizer import load_tokenizer
from tests.support.engines import run_all, tokens_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

NUM_TOKENS = 64
PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a",
    "def quicksort(items):\n",
    "Water boils at",
    "The three laws of motion are",
    "Dear Sir or Madam,",
    "import numpy as np\n",
    "1, 2, 3, 5, 8,",
    "Roses are red,",
    "The mitochondria is",
    "SELECT name FROM users WHERE",
    "In 1969, the first",
    "To make bread you need",
    "¿Cómo estás?",
    "Bonjour, je m'appelle",
    "The quick brown fox",
    "Q: What is the tallest mountain?\nA:",
    "Once the sun had set, the",
    "# Introduction\n\n",
    "<|im_start|>user\nTell me a joke.<|im_end|>\n<|im_start|>assistant\n",
)
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


def oracle(path: Path) -> Any:
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
    model = transformers.LlamaForCausalLM(config).eval()
    missing = model.load_state_dict(state, strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["lm_head.weight"], [])
    return model


def test_greedy_answers_to_20_prompts_are_those_of_transformers(smollm2_path):
    """Each token must be the oracle's most likely one after the prompt and the tokens before it."""
    tokenizer = load_tokenizer(smollm2_path)
    config = EngineConfig(model=str(smollm2_path), backend="reference", num_blocks=200, max_seq_len=256)
    engine = Engine(config, InProcessExecutor(open_runner(config, [], lambda done, total: None)), tokenizer)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = [tuple(tokenizer.encode(text)) for text in PROMPTS]
    found = run_all(engine, *(Request(text, ids, params) for text, ids in zip(PROMPTS, prompts, strict=True)))
    model = oracle(smollm2_path)
    for text, ids in zip(PROMPTS, prompts, strict=True):
        answer = tokens_of(found[text])
        assert len(answer) == NUM_TOKENS
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *answer]])).logits[0]
        assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == answer, text
