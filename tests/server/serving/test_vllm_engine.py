"""kvloom's server over vLLM as its engine (docs/engines.md): what works, and what is refused by name.

Over a fake vLLM whose tokens are known, and over vLLM itself (tests/support/vllm/serving.py).
"""

import json
import os
import signal
import threading
import time

import httpx
import pytest

from kvloom.contract.config import EngineConfig, TierConfig
from kvloom.contract.errors import BadRequest
from kvloom.server.config.plugin_options import SETTINGS, option_of, plugin_options
from kvloom.vllm.arguments import arguments_of
from tests.support.commands import run_cli
from tests.support.models.adapters import TINY_SHAPES, make_adapter
from tests.support.models.byte_folder import make_byte_folder
from tests.support.processes import ServeProcess
from tests.support.vllm.serving import OVER_VLLM, START_S, WAIT_S, vllm_server

SHAPES = {"layers.0.o": (512, 512)} if OVER_VLLM else TINY_SHAPES  # of an adapter that fits the model


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    make_adapter(folder / "lora/a", SHAPES)
    make_adapter(folder / "lora/large", SHAPES, rank=64)
    with vllm_server(folder, "--lora-root", str(folder / "lora"), "--max-seq-len", "2000") as running:
        yield running


def post(server: ServeProcess, path: str, **body: object) -> httpx.Response:
    return httpx.post(server.url + path, json={"model": "m", **body}, timeout=WAIT_S)


def complete(server: ServeProcess, **fields: object) -> list[dict]:
    answer = post(server, "/v1/completions", **{"prompt": "Hello", "max_tokens": 20, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def test_the_same_request_has_the_same_answer_in_every_dialect_streamed_and_whole(server):
    whole = complete(server)[0]["text"]
    assert len(whole) == 20
    body = {"model": "m", "prompt": "Hello", "max_tokens": 20, "temperature": 0, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=WAIT_S) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == whole
    tgi = httpx.post(server.url + "/generate", json={"inputs": "Hello", "parameters": {"max_new_tokens": 20}})
    assert tgi.json()["generated_text"] == whole
    triton = post(server, "/v2/models/m/generate", text_input="Hello", parameters={"max_new_tokens": 20})
    assert triton.json()["text_output"] == whole
    messages = [{"role": "user", "content": "Hi"}]
    chat = {"messages": messages, "max_tokens": 9, "temperature": 0}
    openai = post(server, "/v1/chat/completions", **chat).json()["choices"][0]["message"]["content"]
    assert post(server, "/v1/messages", **chat).json()["content"][0]["text"] == openai
    responses = post(server, "/v1/responses", input=messages, max_output_tokens=16, temperature=0).json()
    assert responses["output"][0]["content"][0]["text"].startswith(openai)
    ollama = post(server, "/api/chat", messages=messages, stream=False, options={"num_predict": 9, "temperature": 0})
    assert ollama.json()["message"]["content"] == openai


SAMPLED = {"temperature": 0.9, "seed": 5}


@pytest.mark.parametrize(
    ("fields", "holds"),
    [
        ({"n": 3, **SAMPLED}, lambda found: len({choice["text"] for choice in found}) == 3),
        ({"n": 1, "best_of": 3, **SAMPLED}, lambda found: len(found) == 1),
        ({"stop_token_ids": list(range(97, 123))}, lambda found: found[0]["finish_reason"] == "stop"),
        ({"min_tokens": 3, "stop_token_ids": list(range(97, 123))}, lambda found: len(found[0]["text"]) >= 2),
        ({"logprobs": 2}, lambda found: [value < 0 for value in found[0]["logprobs"]["token_logprobs"]] == [True] * 20),
        ({"prompt_logprobs": 1}, lambda found: len(found[0]["prompt_logprobs"]) == 5),
        ({"echo": True, "max_tokens": 3}, lambda found: found[0]["text"].startswith("Hello")),
        ({"logit_bias": {"97": 100}}, lambda found: found[0]["text"] == "a" * 20),
        ({"frequency_penalty": 1, "presence_penalty": 1, "repetition_penalty": 2}, lambda found: found[0]["text"]),
        ({"top_k": 3, "top_p": 0.5, "min_p": 0.1, **SAMPLED}, lambda found: found[0]["text"]),
        ({"priority": 2}, lambda found: found[0]["text"]),
        ({"cache_salt": "mine"}, lambda found: found[0]["text"]),
        ({"response_format": {"type": "json_object"}}, lambda found: found[0]["text"].lstrip().startswith("{")),
        ({"prompt": [72, 101]}, lambda found: found[0]["text"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_vllm_can_do_works(server, fields, holds):
    assert holds(complete(server, **fields))


def test_a_seed_gives_the_same_answer_and_a_stop_string_ends_it(server):
    text = complete(server, **SAMPLED)[0]["text"]
    assert complete(server, **SAMPLED)[0]["text"] == text
    assert complete(server, **SAMPLED, stop=text[5:8])[0]["text"] == text[: text.index(text[5:8])]


def test_tokens_are_counted_by_the_servers_own_tokenizer(server):
    assert post(server, "/tokenize", prompt="Hello").json()["tokens"] == list(b"Hello")


REFUSED = [
    ("/generate", {"inputs": "Hi", "parameters": {"typical_p": 0.5}}, "typical_p", "vLLM has no typical sampling"),
    ("/generate", {"inputs": "Hi", "parameters": {"watermark": True}}, "watermark", "vLLM's watermarks are not those"),
    ("/v1/embeddings", {"model": "m", "input": "Hi"}, "input", "vLLM was started to generate"),
]


@pytest.mark.parametrize(
    ("path", "body", "field", "why"), REFUSED, ids=lambda value: value if str(value)[0] == "/" else ""
)
def test_what_vllm_cannot_do_is_refused_by_name(server, path, body, field, why):
    answer = httpx.post(server.url + path, json=body, timeout=WAIT_S)
    assert answer.status_code in (400, 422)
    assert f"{field}: the engine of this model cannot do it: {why}" in answer.text


def test_an_adapter_is_loaded_at_run_time_and_answers_otherwise(server):
    loaded = post(server, "/v1/load_lora_adapter", lora_name="a", lora_path="a")
    assert loaded.status_code == 200, loaded.text
    assert complete(server, model="a")[0]["text"] != complete(server)[0]["text"]


ONLY_VLLMS = "vllm:prompt_tokens_by_source_total" if OVER_VLLM else "vllm:fake_things_total"


def test_vllms_own_metrics_are_passed_on_but_for_those_that_the_server_has(server):
    complete(server)
    deadline = time.monotonic() + WAIT_S
    while f"{ONLY_VLLMS}{{" not in (text := httpx.get(server.url + "/metrics").text):
        assert time.monotonic() < deadline
    assert f"# TYPE {ONLY_VLLMS} counter" in text
    assert text.count("# TYPE vllm:prompt_tokens_total counter") == 1
    assert "python_info" not in text


def test_a_killed_vllm_under_load_is_a_pause_and_every_stream_ends_once(server):
    asked = {"max_tokens": 300, "ignore_eos": True, **SAMPLED}
    whole = complete(server, **asked)[0]["text"]
    found: list[list[str]] = []

    def stream() -> None:
        body = {"model": "m", "prompt": "Hello", "stream": True, **asked}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=START_S) as response:
            found.append([line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data:")])

    threads = [threading.Thread(target=stream) for _ in range(8)]
    for thread in threads:
        thread.start()
    while "vllm:num_requests_running" not in (text := httpx.get(server.url + "/metrics").text) or not running_of(text):
        pass
    os.kill(server.rank_pid(), signal.SIGKILL)
    for thread in threads:
        thread.join(START_S)
    assert len(found) == 8
    for lines in found:
        assert lines[-1] == "[DONE]"
        choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
        assert "".join(choice["text"] for choice in choices) == whole
        assert [choice["finish_reason"] for choice in choices].count("length") == 1
    assert "model_restarts_total" in httpx.get(server.url + "/metrics").text


def running_of(metrics: str) -> float:
    line = next(line for line in metrics.splitlines() if line.startswith("vllm:num_requests_running{"))
    return float(line.rpartition(" ")[2])


def test_a_vllm_for_embeddings_embeds_and_generates_nothing(tmp_path):
    with vllm_server(tmp_path, "--vllm", "runner=pooling") as server:
        vector = post(server, "/v1/embeddings", input="Hello").json()["data"][0]["embedding"]
        assert len(vector) == (512 if OVER_VLLM else 8)
        answer = post(server, "/v1/completions", prompt="Hello", max_tokens=5)
        assert answer.status_code == 400
        assert "prompt: the engine of this model cannot do it: vLLM was started for embeddings" in answer.text


FLAGS = [
    ("--tensor-parallel-size", "2", "tensorParallelSize"),
    ("--pipeline-parallel-size", "2", "pipelineParallelSize"),
    ("--distributed-executor-backend", "ray", "distributedExecutorBackend"),
    ("--quantization", "fp8", "quantization"),
    ("--max-model-len", "100", "maxModelLen"),
    ("--vllm", "enforce_eager=true", "vllm"),
]


@pytest.mark.parametrize(("flag", "value", "name"), FLAGS)
@pytest.mark.parametrize("backend", ["cpu", "mock"])
def test_an_option_of_vllm_is_refused_by_name_with_another_back_end(tmp_path, flag, value, name, backend):
    model = make_byte_folder(tmp_path / "m")
    ended = run_cli("serve", str(model), "--backend", backend, "--port", "0", flag, value)
    assert ended.returncode == 1
    assert f"kvloom: {name}: " in ended.stderr
    assert "backend vllm" in ended.stderr


def test_options_become_vllms_own_arguments(tmp_path):
    named = {name: 2 for name in SETTINGS}
    options = plugin_options({"backend": "vllm", **named, "dtype": "half", "engine_options": {"enforce_eager": False}})
    assert options == {**named, "dtype": "half", "enforce_eager": False}
    tier = TierConfig("a:b", 0.25, {"socket": "/s", "access_id": "i"})
    config = EngineConfig(model=str(make_byte_folder(tmp_path)), backend="vllm", plugin_options=options, kv_tier=tier)
    arguments = arguments_of(config)
    assert {"--tensor-parallel-size=2", "--no-enforce-eager", "--dtype=half", "--scheduling-policy=priority"} <= {
        *arguments
    }
    (transfer,) = (json.loads(a.partition("=")[2]) for a in arguments if a.startswith("--kv-transfer-config="))
    assert transfer["kv_connector_module_path"] == "ems.integration.vllm"
    assert transfer["kv_connector_extra_config"] == {"socket": "/s", "access_id": "i", "timeout_ms": 250}


@pytest.mark.parametrize("text", ["x", "=3", "a b=3", "4=5"])
def test_an_option_is_a_pair(text):
    with pytest.raises(BadRequest, match="vllm: must be KEY=VALUE"):
        option_of(text)


@pytest.mark.parametrize(
    ("text", "pair"), [("a=1", ("a", 1)), ("--max-x=true", ("max_x", True)), ("d=half", ("d", "half"))]
)
def test_a_value_is_json_where_it_reads_as_such(text, pair):
    assert option_of(text) == pair
