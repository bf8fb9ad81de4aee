"""EMS in LMCache, SGLang and vLLM's own offloading: loaded by their factories, over the agent's socket.

KVLOOM_LMCACHE_PYTHON, KVLOOM_SGLANG_PYTHON and KVLOOM_VLLM_PYTHON name interpreters that have LMCache 0.5, SGLang 0.5
(its storage classes need torch and a few pure packages) and vLLM 0.32; CPU builds will do.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pool.agents import running_agent

ROOT = Path(__file__).parents[2]
PLUGINS = Path(__file__).parent / "plugins"
pytestmark = [pytest.mark.compat, pytest.mark.timeout(300)]


def run(package: str, script: str, *arguments: str) -> str:
    """The output of a script, or of a module of the package, run by the interpreter that has the package."""
    variable = f"KVLOOM_{package.upper()}_PYTHON"
    python = os.environ.get(variable)
    if python is None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; {variable} may name an interpreter that has it")
    program = [str(PLUGINS / script)] if script.endswith(".py") else ["-m", script]
    command = [python or sys.executable, *program, *arguments]
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("KVLOOM_PLUGINS_PATH", ""))))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "LMCACHE_TRACK_USAGE": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_sglangs_storage():
    with running_agent() as agent:
        assert "WELL" in run("sglang", "sglang_storage.py", str(agent.config.socket))


def test_vllms_offloading_tier():
    with running_agent() as agent:
        assert "WELL" in run("vllm", "vllm_tier.py", str(agent.config.socket))


def test_lmcaches_l2_outlives_its_process():
    """A second storage manager finds the stored chunks of 256 KiB, but not with another salt, dtype or model."""
    with running_agent(pool_bytes=32 << 20, segment_bytes=4 << 20, slab_bytes=1 << 20) as agent:
        socket = str(agent.config.socket)
        run("lmcache", "lmcache_l2.py", socket, "m", "store")
        assert "FOUND 0 0 24" in run("lmcache", "lmcache_l2.py", socket, "m", "fetch")
        assert "FOUND 0 0 0" in run("lmcache", "lmcache_l2.py", socket, "other", "fetch")
        assert agent.node.pools()[0].counts["load_hits"] == 24
    assert "FOUND 0 0 0" in run("lmcache", "lmcache_l2.py", socket, "m", "fetch"), "without an agent"


def test_lmcaches_own_check_of_l2_adapters():
    """LMCache's bench stores, looks up and loads, four submits at a time, and verifies the loaded bytes."""
    with running_agent(pool_bytes=128 << 20, segment_bytes=16 << 20, slab_bytes=1 << 20) as agent:
        adapter = {"module_path": "ems.integration.lmcache", "class_name": "EmsL2Adapter"}
        settings = {"socket": str(agent.config.socket), "model_id": "m", "timeout_ms": 5000}
        spec = json.dumps({"type": "plugin", **adapter, "adapter_params": settings})
        options = ("--num-keys=8", "--rounds=2", "--in-flight=4", "--lookup-max-hit-rate=0.5", "--no-skip-verify")
        told = run("lmcache", "lmcache.cli.main", "bench", "l2", "--l2-adapter", spec, *options)
        assert re.findall(r"Total success: +(\d+)", told) == ["64", "32", "64"]
        assert agent.node.pools()[0].counts["load_hits"] == agent.node.pools()[0].counts["load_keys"]
