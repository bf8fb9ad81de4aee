"""EMSConnector in vLLM itself: the answer of a fresh engine from EMS equals the computed answer.

KVLOOM_VLLM_PYTHON names an interpreter that has vLLM 0.32 (the CPU build will do) and this package's dependencies.
"""

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvloom.contract.config import EngineConfig, TierConfig
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.rank.fake import ByteTokenizer
from kvloom.rank.opening import open_engine
from tests.support.lazily import lazily
from tests.support.pool.agents import blocks_of, running_agent
from tests.support.waiting import until

transformers = lazily("transformers")

PYTHON = os.environ.get("KVLOOM_VLLM_PYTHON") or sys.executable
if sys.executable == PYTHON and importlib.util.find_spec("vllm") is None:
    pytest.skip(
        "vLLM is not installed; KVLOOM_VLLM_PYTHON may name an interpreter that has it", allow_module_level=True
    )

pytestmark = [pytest.mark.compat, pytest.mark.timeout(900)]
NUM_TOKENS = 300
_NO_OFFLOADING = "CPU Offloading is currently only supported on CUDA-alike and XPU GPUs"
PROMPT = [(7 * i + 3) % 500 for i in range(NUM_TOKENS)]
WHOLE = NUM_TOKENS // 32 * 32  # the number of tokens in full blocks
ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    prompt = {"prompt_token_ids": settings.pop("prompt")}
    llm = LLM(skip_tokenizer_init=True, enforce_eager=True, max_num_seqs=2, block_size=32, disable_log_stats=False,
              **settings)
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, detokenize=False)

    def tell():
        answer = llm.generate([prompt], params)[0]
        print("ANSWER", json.dumps([answer.num_cached_tokens, list(answer.outputs[0].token_ids)]))

    tell()
    assert llm.reset_prefix_cache(reset_connector=True)
    tell()
    counts = {each.name: each.value for each in llm.get_metrics() if each.name.startswith("vllm:ems_")}
    print("COUNTS", json.dumps(counts))
"""


LATER = """
import json, pathlib, sys, time
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    prompt, asked = {"prompt_token_ids": settings.pop("prompt")}, pathlib.Path(settings.pop("asked"))
    wanted = settings.pop("wanted")
    llm = LLM(skip_tokenizer_init=True, enforce_eager=True, max_num_seqs=2, block_size=32, disable_log_stats=False,
              **settings)
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, detokenize=False)
    until_s = time.monotonic() + 90
    while time.monotonic() < until_s:
        answer = llm.generate([prompt], params)[0]
        counts = {each.name: each.value for each in llm.get_metrics() if each.name.startswith("vllm:ems_")}
        print("ANSWER", json.dumps([answer.num_cached_tokens, counts.get("vllm:ems_saved_blocks", 0)]), flush=True)
        asked.touch()
        if counts.get("vllm:ems_saved_blocks", 0) >= wanted:
            break
        time.sleep(0.5)
"""


@dataclass(frozen=True)
class Told:
    """One engine's results: (number of cached prompt tokens, answer), the same after a reset, and EMS counters."""

    first: tuple[int, list[int]]
    after_reset: tuple[int, list[int]]
    counts: dict[str, float]


def connector(socket: Path, layerwise: bool = False) -> dict[str, object]:
    """The kv_transfer_config of EMSConnector."""
    return {
        "kv_connector": "EMSConnector",
        "kv_connector_module_path": "ems.integration.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": str(socket), "timeout_ms": 5000, "layerwise": layerwise},
    }


def offloading(socket: Path) -> dict[str, object]:
    """The kv_transfer_config of vLLM's own offloading to host memory, with EMS as its second tier."""
    tier = {"type": "EmsTier", "module_path": "ems.integration.vllm_tier", "socket": str(socket), "timeout_ms": 5000}
    spec = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 64 << 20, "secondary_tiers": [tier]}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": spec}


def answer(model: Path, transfer: dict[str, object]) -> Told:
    """The results of a new engine."""
    settings = {"model": str(model), "dtype": "bfloat16", "max_model_len": 512, "prompt": PROMPT}
    settings["kv_transfer_config"] = transfer
    settings["kv_events_config"] = {"enable_kv_cache_events": True, "publisher": "null"}
    return _told(run(ENGINE, model / "engine.py", settings))


def run(source: str, script: Path, settings: dict[str, object]) -> list[str]:
    """The lines that a script prints, run by the interpreter that has vLLM."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    script.write_text(source)
    command = [PYTHON, str(script), json.dumps(settings)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    if _NO_OFFLOADING in done.stdout + done.stderr:
        pytest.skip(f"vLLM says: {_NO_OFFLOADING}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout.splitlines()


def _told(lines: list[str]) -> Told:
    answers = [json.loads(line.removeprefix("ANSWER ")) for line in lines if line.startswith("ANSWER ")]
    (counts,) = [json.loads(line.removeprefix("COUNTS ")) for line in lines if line.startswith("COUNTS ")]
    first, after_reset = ((count, tokens) for count, tokens in answers)
    return Told(first, after_reset, counts)


def kvloom_answer(model: Path, socket: Path) -> tuple[int, list[int]]:
    """`Told.first` of kvloom's engine over the same agent."""

    async def ask() -> tuple[int, list[int]]:
        tier = TierConfig("kvloom.rank.tier.ems:open_tier", 5.0, {"socket": str(socket)})
        config = EngineConfig(str(model), block_size=32, num_blocks=64, kv_tier=tier)
        engine = open_engine(config, ByteTokenizer)
        engine.start(asyncio.get_running_loop())
        try:
            request = Request("r", tuple(PROMPT), SamplingParams(temperature=0, ignore_eos=True, max_tokens=24))
            async with aclosing(engine.stream(request)) as stream:
                deltas = [delta async for delta in stream]
            if deltas[-1].num_cached_tokens == 0:
                while engine.stats().total_tier_saved_blocks < WHOLE // 32:
                    await asyncio.sleep(0.01)
            return deltas[-1].num_cached_tokens, [token for delta in deltas for token in delta.token_ids]
        finally:
            await asyncio.to_thread(engine.close)

    return asyncio.run(asyncio.wait_for(ask(), 120))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A small Llama with random weights."""
    return llama_in(tmp_path_factory.mktemp("vllm"))


def llama_in(folder: Path) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def test_what_was_computed_while_the_pool_was_down_is_saved_when_it_is_next_used(model, tmp_path):
    settings = {"model": str(model), "dtype": "bfloat16", "max_model_len": 512, "prompt": PROMPT}
    settings |= {"kv_transfer_config": connector(tmp_path / "ems.sock"), "asked": str(tmp_path / "asked")}
    settings["wanted"] = WHOLE // 32
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run, LATER, model / "later.py", settings)
        until(lambda: (tmp_path / "asked").exists() or running.done(), 120)
        with running_agent(socket=tmp_path / "ems.sock", pool_bytes=64 << 20, slab_bytes=1 << 20):
            lines = running.result(120)
    first, *_, last = [json.loads(line.removeprefix("ANSWER ")) for line in lines if line.startswith("ANSWER ")]
    assert first == [0, 0]
    assert last[0] == WHOLE, "vLLM's own cache had the prompt all the time"
    assert last[1] >= WHOLE // 32, "and was saved"


def test_engines_restart_on_ems_damage_is_computed_and_kinds_never_mix(model):
    """One agent, model and prompt for vLLM, kvloom twice, vLLM layer by layer, and vLLM after a block was damaged."""
    with running_agent(pool_bytes=64 << 20, slab_bytes=1 << 20) as agent:
        socket = agent.config.socket
        cold = answer(model, connector(socket))
        assert cold.first[0] == 0
        expected = cold.first[1]
        assert cold.after_reset == (0, expected), "of old weights nothing is found"
        assert cold.counts["vllm:ems_saved_blocks"] >= 2 * WHOLE // 32
        blocks_of_vllm = agent.node.pools()[0].usage()["blocks"]
        other = kvloom_answer(model, socket)
        assert other[0] == 0, "blocks of vLLM are nothing to kvloom"
        assert kvloom_answer(model, socket) == (WHOLE, other[1])
        pool = agent.node.pools()[0]
        assert pool.usage()["blocks"] >= blocks_of_vllm + WHOLE // 32
        warm = answer(model, connector(socket, layerwise=True))
        assert warm.first == (WHOLE, expected)
        assert warm.after_reset == (0, expected)
        assert warm.counts["vllm:ems_loaded_blocks"] == WHOLE // 32
        third = blocks_of(pool)[2]
        pool.view(third.offset, third.length)[100] ^= 1
        num_cached, tokens = answer(model, connector(socket)).first
        assert tokens == expected
        assert num_cached <= WHOLE
        assert pool.counts["corrupt"] == 1


WINDOW = 64


def gemma_in(folder: Path) -> Path:
    """A small Gemma 3 with random weights: every other layer sees 64 tokens."""
    torch.manual_seed(0)  # with other weights the model repeats one token for ever
    config = transformers.Gemma3TextConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=512,
    )
    transformers.Gemma3ForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def test_a_model_with_sliding_windows_goes_on_from_ems(tmp_path):
    """Cold, restarted, and with damaged blocks, for which vLLM computes the whole request again."""
    model = gemma_in(tmp_path)
    with running_agent(pool_bytes=64 << 20, slab_bytes=1 << 20) as agent:
        socket = agent.config.socket
        cold = answer(model, connector(socket))
        assert cold.first[0] == 0
        assert len(set(cold.first[1])) > 3
        warm = answer(model, connector(socket))
        assert warm.first == (WHOLE, cold.first[1]), (cold.counts, warm.counts)
        assert warm.after_reset == (0, cold.first[1])
        window = -(-(WINDOW - 1) // 32)
        assert warm.counts["vllm:ems_loaded_blocks"] == WHOLE // 32 + window, "of the windows only what is seen"
        assert kvloom_answer(model, socket)[0] == 0, "blocks of vLLM are nothing to kvloom"
        pool = agent.node.pools()[0]
        for entry in blocks_of(pool):
            pool.view(entry.offset, entry.length)[100] ^= 1
        num_cached, tokens = answer(model, connector(socket)).first
        assert (num_cached, tokens) == (0, cold.first[1])
        assert pool.counts["corrupt"] >= 1


def test_vllms_own_offloading_goes_on_from_ems(model):
    """A second engine finds in EMS the blocks that the first one offloaded to host memory."""
    with running_agent(pool_bytes=64 << 20, slab_bytes=1 << 20) as agent:
        cold = answer(model, offloading(agent.config.socket))
        assert cold.first[0] == 0
        assert until(lambda: agent.node.pools()[0].usage()["blocks"]) >= WHOLE // 32
        warm = answer(model, offloading(agent.config.socket))
        assert warm.first == (WHOLE, cold.first[1])
        assert warm.after_reset == (0, cold.first[1])
        assert agent.node.pools()[0].counts["load_hits"] >= WHOLE // 32
