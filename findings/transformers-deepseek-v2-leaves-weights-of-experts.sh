#!/usr/bin/env bash
# Expected: norm_topk_prob, a field of both DeepseekV2Config and DeepseekV3Config, has the weights of a token's chosen
# experts divided by their sum in both families.
# Happens: DeepSeek-V3 does so; DeepSeek-V2 takes the field, keeps it, and computes the same logits with either value.
# A configuration of V2 that says true is served with other numbers than it asks for, without a word.
# transformers 5.24.0, torch 2.13.0 (CPU), run 2026-11-28:
#   norm_topk_prob changes the logits: V3 True, V2 False
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0
cd "$work"
env/bin/python - <<'PY' 2>/dev/null
import torch
import transformers

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 0, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
}


def changes(family: str) -> bool:
    """Whether the logits of a random model depend on the field."""
    found = []
    for is_normed in (False, True):
        config = getattr(transformers, f"{family}Config")(**SIZES, norm_topk_prob=is_normed)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        with torch.no_grad():
            found.append(model(torch.arange(10)[None]).logits)
    return bool((found[0] - found[1]).abs().max() > 1e-4)


v3, v2 = changes("DeepseekV3"), changes("DeepseekV2")
print(f"norm_topk_prob changes the logits: V3 {v3}, V2 {v2}")
assert (v3, v2) == (True, False)
PY
