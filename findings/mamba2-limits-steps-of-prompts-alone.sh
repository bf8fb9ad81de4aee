#!/usr/bin/env bash
# Expected: time_step_limit of a Mamba-2 configuration bounds the step of every token, so that the logits of a token are
# the same whether it is read with its prompt or decoded behind it.
# Happens: the limit acts where several tokens are read at once, and not where one token is decoded. So an answer depends
# on how it was computed. Without a limit both agree to 1e-6.
# transformers 5.24.0, torch 2.13.0 (CPU), run 2026-11-28:
#   limit (0.5, 0.6): differs True; no limit: differs False
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0
cd "$work"
env/bin/python - <<'PY' 2>/dev/null
import math

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 16, "state_size": 16}


def differs(limit: tuple[float, float]) -> bool:
    """Whether the last token's logits, decoded behind the others, are not those of reading all at once."""
    torch.manual_seed(0)
    model = Mamba2ForCausalLM(Mamba2Config(**SIZES, n_groups=1, expand=2, chunk_size=8, time_step_limit=limit)).eval()
    tokens = torch.randint(0, 64, (1, 12))
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits[0, -1]
        cache = model(tokens[:, :-1], use_cache=True).cache_params
        decoded = model(tokens[:, -1:], cache_params=cache, use_cache=True).logits[0, -1]
    return float((whole - decoded).abs().max()) > 1e-3


limited, free = differs((0.5, 0.6)), differs((0.0, math.inf))
print(f"limit (0.5, 0.6): differs {limited}; no limit: differs {free}")
assert (limited, free) == (True, False)
PY
