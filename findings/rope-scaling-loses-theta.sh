#!/usr/bin/env bash
# Expected: rope_scaling, which model cards advise to add to config.json for long texts, is joined with the
# rope_parameters that transformers 5 writes there, or is refused: the file says rope_theta 1,000,000.
# Happens: rope_scaling takes the place of all rope_parameters, and rope_theta becomes the default 10,000. Nothing is
# said; every answer is computed with another base.
# transformers 5.24.0, run 2026-11-27:
#   rope_theta alone: 1000000.0; with rope_scaling beside it: 10000.0
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check transformers==5.24.0
cd "$work"
env/bin/python - <<'PY'
import json

from transformers import AutoConfig

config = {"model_type": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def theta(**more):
    with open("config.json", "w") as file:
        json.dump(config | more, file)
    return AutoConfig.from_pretrained(".").rope_parameters["rope_theta"]


alone, beside = theta(), theta(rope_scaling=scaling)
print(f"rope_theta alone: {alone}; with rope_scaling beside it: {beside}")
assert (alone, beside) == (1000000.0, 10000.0)
PY
