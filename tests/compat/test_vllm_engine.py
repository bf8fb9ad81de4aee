"""kvloom's server over vLLM itself: it gives the tokens of vLLM's own server, and loads prompts from EMS.

`make compat-vllm` makes an environment with vLLM 0.32, and runs this file and the server's other tests over it.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from kvloom.checkpoints.demo_models import find_model
from kvloom.contract.errors import ModelError
from tests.support.lazily import lazily
from tests.support.models.byte_folder import EOS, VOCAB_SIZE, make_byte_folder
from tests.support.pool.agents import blocks_of, running_agent
from tests.support.ports import free_port
from tests.support.processes import ServeProcess, serving
from tests.support.vllm.serving import ENVIRONMENT, OVER_VLLM, PYTHON, START_S, WAIT_S, environment
from tests.support.waiting import until

transformers = lazily("transformers")

if not OVER_VLLM:
    pytest.skip("needs vLLM itself: make compat-vllm", allow_module_level=True)

pytestmark = [pytest.mark.compat, pytest.mark.timeout(900)]


@contextmanager
def kvloom(folder: Path, model: Path, name: str, **deploy: Any) -> Iterator[ServeProcess]:
    """kvloom's server over vLLM, configured by a config.json in `folder`."""
    own = {"modelName": name, "modelWeightPath": str(model), "backendType": "vllm"}
    own["engineOptions"] = {"enforce_eager": True, "dtype": "bfloat16"}
    document = {
        "Version": "1.0.0",
        "ServerConfig": {"ipAddress": "127.0.0.1", "port": free_port(), "validateModel": True},
        "BackendConfig": {
            "npuDeviceIds": [[0]],
            **deploy,
            "ModelDeployConfig": {"maxSeqLen": 2048, "ModelConfig": [own]},
            "ScheduleConfig": {"maxIterTimes": 512},
        },
        "LogConfig": {"logLevel": "Warning", "logPath": "log.log"},
    }
    config = folder / "config.json"
    config.write_text(json.dumps(document))
    config.chmod(0o640)
    command = [PYTHON, "-m", "kvloom.cli", "serve", "--config", str(config)]
    with serving(command, START_S, **environment(folder)) as server:
        yield server
        server.stop()


@contextmanager
def vllm_alone(model: Path) -> Iterator[str]:
    """vLLM's own server."""
    port = free_port()
    command = [PYTHON, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--port", str(port), "--enforce-eager"]
    command += ["--host", "127.0.0.1", "--served-model-name", "m", "--dtype", "bfloat16", "--max-num-seqs", "64"]
    url = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        assert process.poll() is None, "vLLM's own server ended"
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.HTTPError:
            return False

    null = subprocess.DEVNULL
    process = subprocess.Popen(
        command, env={**os.environ, **ENVIRONMENT}, stdout=null, stderr=null, start_new_session=True
    )
    try:
        until(is_up, START_S)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tiny(folder: Path) -> Path:
    """A random Llama whose tokens are bytes."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=2048, eos_token_id=EOS, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    make_byte_folder(folder, **{name: value for name, value in config.to_dict().items() if name != "eos_token_id"})
    tokenizer = (folder / "config.json").read_text()
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**json.loads(tokenizer), "architectures": ["LlamaForCausalLM"]}))
    return folder


def greedy(url: str, model: str, prompt: list[int]) -> list[int]:
    """The token ids of a greedy answer; both servers return them."""
    body = {"model": model, "prompt": prompt, "max_tokens": 64, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{url}/v1/completions", json={**body, "return_token_ids": True}, timeout=WAIT_S)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    """The real model, in bfloat16."""
    try:
        file = find_model("smollm2")
    except ModelError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("smollm2") / "m"
    packed = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    fields = {name: value for name, value in packed.config.to_dict().items() if name != "quantization_config"}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).to(torch.bfloat16)
    model.load_state_dict(packed.state_dict())
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return folder


TEXTS = ["The capital of France is", "def add(a, b):", "Once upon a time", "2 + 2 =", "Water boils at", "The moon is"]


def test_greedy_tokens_are_vllms_own(smollm2, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    prompts = [tokenizer.encode(f"{text}{' and' * (i // len(TEXTS))}") for i, text in enumerate((TEXTS * 4)[:20])]
    with kvloom(tmp_path, smollm2, "m") as server:
        ours = [greedy(server.url, "m", prompt) for prompt in prompts]
    with vllm_alone(smollm2) as url:
        theirs = [greedy(url, "m", prompt) for prompt in prompts]
    assert [len(answer) for answer in ours] == [64] * 20
    assert ours == theirs


def test_a_prompt_comes_from_ems_after_a_restart_and_in_another_instance(tmp_path):
    model, answers = tiny(tmp_path / "m"), []
    body = {"prompt": [(7 * i + 3) % 250 for i in range(1000)], "max_tokens": 24}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with running_agent(pool_bytes=64 << 20, slab_bytes=1 << 20) as agent:
        pool = {"backend": "ems", "socketPath": str(agent.config.socket), "timeoutMs": 5000}
        for name in ("first", "restarted-as-another"):
            with kvloom(tmp_path, model, name, kvPoolConfig=pool) as server:
                answer = httpx.post(f"{server.url}/v1/completions", json={"model": name, **body}, timeout=WAIT_S).json()
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                answers.append((cached, answer["choices"][0]["token_ids"]))
                until(lambda: blocks_of(agent.node.pools()[0]), WAIT_S)
    (cold, first), (warm, second) = answers
    assert cold == 0
    assert warm >= 896
    assert first == second
