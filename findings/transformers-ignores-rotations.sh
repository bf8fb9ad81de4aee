#!/usr/bin/env bash
# Expected: a folder of compressed-tensors whose transform_config says that a linear's input is rotated when the model
# runs (location: input) gives the same answers after from_pretrained as the model that was saved; both libraries are
# each other's, and the matrix of the rotation is in the file.
# Happens: the weights, which were stored rotated, are loaded and no input is. from_pretrained reports the matrix as
# UNEXPECTED and goes on; the logits are others.
# transformers 5.24.0, compressed-tensors 0.20.0, torch 2.13.0, run 2026-11-27:
#   largest difference of logits, rotated in memory: 0.00000; saved and loaded: 0.07982
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0 compressed-tensors==0.20.0
cd "$work"
env/bin/python - <<'PY' 2>/dev/null
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.transform import TransformArgs, TransformConfig, TransformScheme, apply_transform_config
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).eval()


@torch.no_grad()
def logits(of):
    return of(torch.arange(8)[None]).logits


plain = logits(model)
linears = {"targets": ["re:.*down_proj$"]}
uses = [TransformArgs(**linears, location="input"), TransformArgs(**linears, location="weight_input", inverse=True)]
apply_transform_config(model, TransformConfig(config_groups={"R4": TransformScheme(type="hadamard", apply=uses)}))
in_memory = float((logits(model) - plain).abs().max())
compressor = ModelCompressor.from_pretrained_model(model)
model.save_pretrained("saved")
compressor.update_config("saved")
loaded = float((logits(LlamaForCausalLM.from_pretrained("saved").eval()) - plain).abs().max())
print(f"largest difference of logits, rotated in memory: {in_memory:.5f}; saved and loaded: {loaded:.5f}")
assert in_memory < 1e-5 and loaded > 0.01
PY
