"""EMSConnector in vLLM itself: a fresh engine answers from EMS as it would have answered by computing.

KVLOOM_VLLM_PYTHON names an interpreter that has vLLM 0.32 (the CPU build will do) and this package's dependencies.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from tests.support.pool import running_agent

PYTHON = os.environ.get("KVLOOM_VLLM_PYTHON") or sys.executable
if sys.executable == PYTHON and importlib.util.find_spec("vllm") is None:
    pytest.skip(
        "vLLM is not installed; KVLOOM_VLLM_PYTHON may name an interpreter that has it", allow_module_level=True
    )

pytestmark = [pytest.mark.compat, pytest.mark.timeout(900)]
NUM_TOKENS = 300
ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    num_tokens = settings.pop("num_tokens")
    llm = LLM(skip_tokenizer_init=True, enforce_eager=True, max_num_seqs=2, block_size=32, **settings)
    prompt = {"prompt_token_ids": [(7 * i + 3) % 500 for i in range(num_tokens)]}
    answer = llm.generate([prompt], SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, detokenize=False))[0]
    print("ANSWER", json.dumps([answer.num_cached_tokens, list(answer.outputs[0].token_ids)]))
"""


def answer(model: Path, socket: Path) -> tuple[int, list[int]]:
    """(tokens of the prompt that came from a cache, answer) of an engine of its own."""
    transfer = {
        "kv_connector": "EMSConnector",
        "kv_connector_module_path": "ems.integration.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": str(socket), "timeout_ms": 5000},
    }
    settings = {"model": str(model), "dtype": "bfloat16", "max_model_len": 512, "num_tokens": NUM_TOKENS}
    settings["kv_transfer_config"] = transfer
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    script = model / "engine.py"
    script.write_text(ENGINE)
    command = [PYTHON, str(script), json.dumps(settings)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, done.stdout[-2000:] + done.stderr[-2000:]
    num_cached, tokens = json.loads(lines[0].removeprefix("ANSWER "))
    return num_cached, tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A small Llama with random weights."""
    folder = tmp_path_factory.mktemp("vllm")
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


def test_a_restarted_engine_answers_from_ems_and_damage_is_computed(model):
    with running_agent(pool_bytes=64 << 20, slab_bytes=1 << 20) as agent:
        socket = agent.config.socket
        cold, expected = answer(model, socket)
        assert cold == 0
        whole = NUM_TOKENS // 32 * 32
        assert answer(model, socket) == (whole, expected)
        pool = agent.node.pools()[0]
        third = list(pool._index.values())[2]
        pool.view(third.offset, third.length)[100] ^= 1
        num_cached, tokens = answer(model, socket)
        assert tokens == expected
        assert num_cached <= whole
        assert pool.counts["corrupt"] == 1
