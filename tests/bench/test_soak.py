"""A short soak on a model of two thin layers: with kills and restarts every answer is the undisturbed one.

KVLOOM_SOAK_S runs a soak of this many seconds on the demo model instead.
"""

import json
import os

import pytest
from benches.server import soak

SOAK_S = float(os.environ.get("KVLOOM_SOAK_S", "0"))
SHORT_S = 2.0


@pytest.mark.real
@pytest.mark.timeout(600 + 4 * SOAK_S)
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_answers_under_kills_are_the_undisturbed_ones(kv_dtype, capsys, smollm2_path, tiny_path):
    model, kv_mb = ("smollm2", 60) if SOAK_S else (str(tiny_path), 1)
    arguments = ["--model", model, "--minutes", str((SOAK_S or SHORT_S) / 60), "--cases", "10"]
    arguments += [] if SOAK_S else ["--clients", "3"]
    code = soak.main([*arguments, "--kv-mb", str(kv_mb), "--kv-dtype", kv_dtype])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    counted = {line["name"]: line["value"] for line in lines}
    assert (code, counted["different"], counted["wrong_bytes"]) == (0, 0, 0)
    assert counted["compared"] > 0
    assert counted["loaded_blocks"] > 0
