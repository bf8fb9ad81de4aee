"""The routes with which vLLM's server describes itself, its tokenizer and its prefix cache; OpenAI's routes without
/v1.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from kvloom.contract.config import EngineConfig, TierConfig
from kvloom.engine.text.tokenizer import load_tokenizer
from kvloom.server.dialects.vllm.tokenizer_info import _encode
from kvloom.server.serving.card import ModelCard
from kvloom.server.serving.service import GenerationService
from tests.server.run.test_daemon import DAEMON, install
from tests.support.lazily import lazily
from tests.support.ports import free_port
from tests.support.processes import serving
from tests.support.servers import MODEL, FakeServer, fake_server
from tests.support.waiting import until

openai = lazily("openai")

PROMPT = "a" * 100


def num_cached(server: FakeServer, **fields: object) -> int:
    usage = server.complete(PROMPT, max_tokens=1, **fields).json()["usage"]
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))


def test_version_and_load():
    with fake_server(has_eos=False, step_s=0.005) as server, ThreadPoolExecutor(3) as pool:
        assert server.client.get("/version").json() == {"version": version("kvloom")}
        assert server.client.get("/load").json() == {"server_load": 0}
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 200}
        asked = [pool.submit(httpx.post, server.url + "/v1/completions", json=body, timeout=120) for _ in range(3)]
        until(lambda: server.client.get("/load").json() == {"server_load": 3})
        assert [one.result().status_code for one in asked] == [200] * 3
        assert server.client.get("/load").json() == {"server_load": 0}


def test_server_info_has_vllms_names_in_both_forms(server: FakeServer):
    info = server.client.get("/server_info", params={"config_format": "json"}).json()
    assert info.keys() > {"vllm_config", "vllm_env", "system_env"}
    facts = server.client.get("/get_server_info").json()
    assert info.keys() - facts.keys() == {"vllm_config", "vllm_env", "system_env"}
    assert {name: info[name] for name in facts} == facts  # under SGLang's names as well
    config = info["vllm_config"]
    assert config["model_config"]["served_model_name"] == MODEL
    assert config["model_config"]["max_model_len"] == server.engine.max_seq_len
    assert config["cache_config"]["num_gpu_blocks"] == server.engine.info.num_blocks
    assert config["kvloom_config"]["server"]["api_keys"] == 0
    text = server.client.get("/server_info").json()["vllm_config"]
    assert isinstance(text, str)
    assert "max_model_len" in text


def test_the_prefix_cache_is_reset_while_others_run():
    with fake_server(has_eos=False, step_s=0.002) as server, ThreadPoolExecutor(1) as pool:
        assert (num_cached(server), num_cached(server) > 0) == (0, True)
        for query, preempted in (("", 0), ("?reset_running_requests=true", 1)):
            body = {"model": MODEL, "prompt": "the quick", "max_tokens": 100, "temperature": 0}
            expected = server.post("/v1/completions", body).json()["choices"][0]["text"]
            running = pool.submit(httpx.post, server.url + "/v1/completions", json=body, timeout=120)
            until(lambda: server.engine.stats().num_running == 1)
            before = server.engine.stats().total_preemptions
            assert server.post("/reset_prefix_cache" + query).json() == {"success": True}
            assert running.result().json()["choices"][0]["text"] == expected
            assert server.engine.stats().total_preemptions == before + preempted
            assert num_cached(server) == 0
            assert num_cached(server) > 0


def test_the_outer_pool_is_not_reset(server: FakeServer):
    assert server.post("/reset_prefix_cache?reset_external=true").json() == {"success": True}  # there is none
    [service] = server.health.models
    before = service.card
    tier = TierConfig("kvloom.rank.tier.ems:open_tier")
    service.card = ModelCard(MODEL, EngineConfig(backend="fake", kv_tier=tier))
    try:
        refused = server.post("/reset_prefix_cache?reset_external=true")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reset_external")
        assert "share the KV pool" in refused.json()["error"]["message"]
    finally:
        service.card = before


@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/reset_prefix_cache", "/v2/repository/index"])
def test_effects_are_asked_for_by_post_only(server: FakeServer, path: str):
    assert server.client.get(path).status_code == 405


def test_routes_that_do_things_ask_for_a_key_and_health_does_not(tmp_path):
    with fake_server(keys=["kvl-" + "k" * 32]) as server:
        for path in ("/sleep", "/wake_up", "/reset_prefix_cache", "/v2/repository/index", "/chat/completions"):
            assert server.post(path).status_code == 401
        for path in ("/version", "/load", "/server_info", "/is_sleeping", "/tokenizer_info", "/v2/models/stats"):
            assert server.client.get(path).status_code == 401
        assert server.client.get("/models").status_code == 401


def test_they_are_on_the_management_port_alone(tmp_path):
    management = free_port()
    posts = ("/sleep", "/wake_up", "/reset_prefix_cache", "/v2/repository/index", "/ping")
    gets = ("/version", "/load", "/server_info", "/is_sleeping", "/v2/models/stats", "/healthz", "/livez", "/readyz")
    with serving([*DAEMON, "--config", str(install(tmp_path, managementPort=management))]) as daemon:
        here, there = daemon.url, f"http://127.0.0.1:{management}"
        assert {httpx.post(here + path).status_code for path in posts} == {404}
        assert {httpx.get(here + path).status_code for path in gets} == {404}
        assert {httpx.post(there + path, timeout=120).status_code for path in posts} == {200}
        assert {httpx.get(there + path).status_code for path in gets} == {200}
        assert httpx.get(here + "/models").status_code == httpx.get(here + "/tokenizer_info").status_code == 200
        assert httpx.get(there + "/models").status_code == 404


# -- tokenizer


def test_the_tokenizers_configuration_is_told(server: FakeServer):
    info = server.client.get("/tokenizer_info").json()
    assert (info["eos_token"], info["model_max_length"]) == ("<eos>", server.engine.max_seq_len)
    assert info["added_tokens_decoder"]["256"] == {"content": "<bos>", "special": True}
    assert info["chat_template"] is None
    assert server.client.get("/tokenizer_info?model=other").status_code == 404


def test_a_real_models_template_and_its_own_file(smollm2_path: Path, tmp_path: Path):
    def told(model: Path) -> dict[str, Any]:
        engine = SimpleNamespace(max_seq_len=2048)
        card = ModelCard("m", EngineConfig(model=str(model)))
        service = SimpleNamespace(card=card, engine=engine, tokenizer=load_tokenizer(smollm2_path))
        found: dict[str, Any] = json.loads(_encode(cast(GenerationService, service)))
        return found

    info = told(smollm2_path)
    assert info["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in info["chat_template"]
    assert info["tokenizer_class"]
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Own", "padding_side": "left"}')
    info = told(tmp_path)
    assert (info["tokenizer_class"], info["padding_side"]) == ("Own", "left")
    (tmp_path / "tokenizer_config.json").write_text("[" * 2000)
    assert told(tmp_path)["tokenizer_class"] == "PreTrainedTokenizerFast"


# -- without /v1


def test_the_openai_client_works_with_a_base_url_that_lacks_v1(server: FakeServer):
    both = []
    for base in (server.url, server.url + "/v1"):
        with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == [MODEL]
            assert client.models.retrieve(MODEL).id == MODEL
            messages: Any = [{"role": "user", "content": "hi"}]
            chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=5)
            stream = client.completions.create(model=MODEL, prompt="hi", temperature=0, max_tokens=5, stream=True)
            text = "".join(chunk.choices[0].text for chunk in stream)
            answer = client.responses.create(model=MODEL, input="hi", max_output_tokens=5, temperature=0)
            vector = client.embeddings.create(model=MODEL, input="hi").data[0].embedding
            both.append((chat.choices[0].message.content, text, answer.output_text, vector))
            with pytest.raises(openai.BadRequestError, match="temperature"):
                client.chat.completions.create(model=MODEL, messages=messages, temperature=9)
            with pytest.raises(openai.NotFoundError):
                client.get("/chat/nothing", cast_to=object)
    assert both[0] == both[1]


def test_no_route_of_another_protocol_is_taken(server: FakeServer):
    assert "generated_text" in server.post("/generate", {"inputs": "hi", "parameters": {"max_new_tokens": 2}}).json()
    assert server.post("/infer", {"inputs": "hi", "parameters": {"max_new_tokens": 2}}).status_code == 200
    assert server.client.get("/v2/models/mock").json()["platform"] == "MindIE Server"
    paths = server.client.get("/openapi.json").json()["paths"]
    assert "/v1/chat/completions" in paths
    assert "/chat/completions" not in paths  # listed once in the description
