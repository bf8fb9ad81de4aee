"""`kvloom serve --backend vllm` for tests: over a fake vLLM whose tokens are known (fake/vllm.py), or over vLLM itself.

KVLOOM_TEST_ENGINE=vllm selects the latter, see hosts.py.
"""

import importlib.metadata
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from tests.support.models.byte_folder import make_byte_folder
from tests.support.processes import ServeProcess, serving

OVER_VLLM = os.environ.get("KVLOOM_TEST_ENGINE") == "vllm"
PYTHON = (os.environ.get("KVLOOM_VLLM_PYTHON") or sys.executable) if OVER_VLLM else sys.executable
START_S, WAIT_S = (400.0, 180.0) if OVER_VLLM else (120.0, 120.0)
FAKE = Path(__file__).resolve().parent / "fake"
SOURCE = Path(__file__).resolve().parents[3] / "src"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def environment(folder: Path) -> Mapping[str, str]:
    """For an interpreter that has vLLM but not kvloom: kvloom's sources, and its version from `folder`."""
    meta = folder / "site/kvloom-0.dist-info/METADATA"
    meta.parent.mkdir(parents=True, exist_ok=True)
    meta.write_text(f"Metadata-Version: 2.1\nName: kvloom\nVersion: {importlib.metadata.version('kvloom')}\n")
    return {**ENVIRONMENT, "PYTHONPATH": f"{SOURCE}:{folder / 'site'}"}


@contextmanager
def vllm_server(folder: Path, *flags: str) -> Iterator[ServeProcess]:
    """A server of the model m, whose tokens are bytes."""
    if OVER_VLLM:
        model = import_module("tests.support.vllm.hosts").chained_model()
        flags += ("--vllm", "enforce_eager=true", "--vllm", "dtype=float32", "--vllm", "block_size=32")
        variables = environment(folder)
    else:
        model = make_byte_folder(folder / "model", max_position_embeddings=2048)
        variables = {"PYTHONPATH": f"{FAKE}:{SOURCE}"}
    command = [PYTHON, "-m", "kvloom.cli", "serve", str(model), "--backend", "vllm", "--served-model-name", "m"]
    with serving([*command, "--port", "0", *flags], START_S, **variables) as running:
        yield running
        running.stop()
