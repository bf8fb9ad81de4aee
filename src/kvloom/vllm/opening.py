"""vLLM as an engine, from the server's side, which imports neither vLLM nor torch."""

import functools
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest, ModelError
from kvloom.contract.messages import Progress
from kvloom.contract.tokenizer import Tokenizer
from kvloom.engine.hosted.host import Host
from kvloom.processes import kinds
from kvloom.vllm.arguments import arguments_of

if TYPE_CHECKING:
    from kvloom.engine.thread import EngineThread

_CHECK = (sys.executable, "-m", "kvloom.vllm.check")
_CHECK_S = 120.0  # seconds for imports that vLLM's arguments need
# fields of EngineConfig that vLLM does not support: (name, its key in configurations, the reason)
_UNUSED = (
    ("weight_format", "weightFormat", "is of the CPU kernels; quantization is vLLM's word"),
    ("weight_cache", "weightCache", "is of the CPU kernels"),
    ("kv_dtype", "kvCacheDtype", "is of the CPU kernels; --vllm kv_cache_dtype=... is vLLM's"),
    ("snapshot_share", "snapshotShare", "is of kvloom's prefix cache"),
    ("dtype", "dtype", "is given with vLLM's own names"),
    ("num_speculative_tokens", "numSpeculativeTokens", "is kvloom's; --vllm speculative_config=... is vLLM's"),
    ("draft_model", "draftModel", "is kvloom's; --vllm speculative_config=... is vLLM's"),
    ("max_gap_s", "maxDecodeGap", "is of kvloom's scheduler"),
    ("fair_token_s", "fairTokenUs", "is of kvloom's scheduler"),
    ("run_ahead", "runAhead", "is of kvloom's scheduler; --vllm async_scheduling=... is vLLM's"),
    ("device", "deviceType", "is decided by the vLLM that is installed"),
    ("rank_cores", "npuDeviceIds", "is decided by vLLM; VLLM_CPU_OMP_THREADS_BIND names cores"),
    ("device_ids", "npuDeviceIds", "is decided by vLLM; CUDA_VISIBLE_DEVICES names devices"),
)


def open_engine(
    config: EngineConfig, vocabulary: Callable[[], Tokenizer], progress: Progress | None = None
) -> "EngineThread":
    """Start vLLM's process, and wait until the model is loaded. Raises BadRequest, ModelError."""
    check_config(config)
    vocabulary = functools.cache(vocabulary)
    host = Host(kinds.VLLM, config, lambda: sorted(vocabulary().eos_ids), progress)
    engine = import_module("kvloom.engine.hosted.engine").HostedEngine(config, host, vocabulary())
    return cast("EngineThread", import_module("kvloom.engine.thread").EngineThread(engine, host))


def check_config(config: EngineConfig) -> None:
    """Check what can be checked without vLLM. Raises BadRequest, ModelError."""
    defaults = EngineConfig(model="m")
    for name, spelt, why in _UNUSED:
        if getattr(config, name) != getattr(defaults, name):
            raise BadRequest(spelt, f"has no effect with backend vllm: it {why}")
    if not Path(config.model).is_dir():
        raise BadRequest("model", "must be a folder with safetensors for backend vllm")
    arguments_of(config)
    if importlib.util.find_spec("vllm") is None:
        raise ModelError("backend vllm: vLLM is not installed; pip install 'kvloom[vllm]' (docs/engines.md)")


def check(config: EngineConfig) -> None:
    """check_config, and a check of the arguments by the installed vLLM, in a process of its own."""
    check_config(config)
    done = subprocess.run(_CHECK, input=msgspec.json.encode(config), capture_output=True, timeout=_CHECK_S, check=False)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise ModelError(lines[-1] if lines else f"vLLM's check of its arguments ended with {done.returncode}")


open_engine.check = check  # type: ignore[attr-defined]
