#!/usr/bin/env bash
# Expected: a checkpoint that transformers reads and saves again keeps the names of its tensors, so that other programs
# that read published files read the copy, too.
# Happens: the dense first layer of a Kimi-Linear, which published files call model.layers.0.mlp.*, is read without a
# complaint and saved as model.layers.0.block_sparse_moe.*, the name of layers with experts; and the saved config.json
# has no linear_attn_config, where published ones say which layers have which attention.
# transformers 5.24.0, torch 2.13.0 (CPU), run 2026-11-28:
#   read: mlp.down_proj mlp.gate_proj mlp.up_proj
#   saved again: block_sparse_moe.down_proj block_sparse_moe.gate_proj block_sparse_moe.up_proj
#   linear_attn_config saved: False
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0
cd "$work"
env/bin/python - <<'PY' 2>/dev/null
import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import KimiLinearConfig, KimiLinearForCausalLM

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "qk_nope_head_dim": 8, "num_experts": 4, "num_experts_per_token": 2, "linear_num_heads": 2, "linear_head_dim": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
FIRST = "model.layers.0."


def dense(folder: Path) -> list[str]:
    names = (name.removesuffix(".weight") for name in load_file(folder / "model.safetensors"))
    return sorted(name.removeprefix(FIRST) for name in names if name.startswith(FIRST) and ("mlp" in name or "moe" in name))


published, copy = Path("published"), Path("copy")
KimiLinearForCausalLM(KimiLinearConfig(**SIZES)).save_pretrained(published)
tensors = load_file(published / "model.safetensors")
renamed = {name.replace(f"{FIRST}block_sparse_moe.", f"{FIRST}mlp."): tensor for name, tensor in tensors.items()}
save_file(renamed, published / "model.safetensors", metadata={"format": "pt"})
read = dense(published)
model, told = KimiLinearForCausalLM.from_pretrained(published, output_loading_info=True)
assert not any(told.values()), "all tensors of the published names are read"
model.save_pretrained(copy)
saved, has_layers = dense(copy), "linear_attn_config" in json.loads((copy / "config.json").read_text())
print("read:", *read)
print("saved again:", *saved)
print("linear_attn_config saved:", has_layers)
parts = ("down_proj", "gate_proj", "up_proj")
assert read == [f"mlp.{part}" for part in parts]
assert saved == [f"block_sparse_moe.{part}" for part in parts] and not has_layers
PY
