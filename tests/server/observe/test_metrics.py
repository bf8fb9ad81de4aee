"""/metrics, read with Prometheus' own parser: the figures agree with what ran."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvloom.engine.histogram import Histogram
from kvloom.server.observe.meter import Throughput
from kvloom.server.serving.options import WireOptions
from tests.support.models.adapters import TINY_SHAPES, make_adapter
from tests.support.servers import MODEL, FakeServer, fake_server
from tests.support.waiting import until

# The families that vLLM 0.10 to 0.33 shows in its dashboards (grafana.json, performance_statistics.json,
# query_statistics.json), documents and tests of /metrics, with their types.
VLLM_FAMILIES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:num_requests_waiting_by_reason": "gauge",
    "vllm:num_requests_swapped": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:gpu_cache_usage_perc": "gauge",
    "vllm:cpu_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:engine_sleep_state": "gauge",
    "vllm:lora_requests_info": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:prompt_tokens_cached": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:spec_decode_num_drafts": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "counter",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:request_prefill_kv_computed_tokens": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:time_per_output_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
}
CACHE_LABELS = {
    "block_size",
    "cache_dtype",
    "cpu_offload_gb",
    "enable_prefix_caching",
    "gpu_memory_utilization",
    "num_cpu_blocks",
    "num_gpu_blocks",
    "num_gpu_blocks_override",
    "sliding_window",
    "swap_space_bytes",
}


def samples_of(server: FakeServer) -> list[Sample]:
    text = server.client.get("/metrics").text
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def scrape(server: FakeServer) -> dict[tuple[str, str], float]:
    """(sample name, labels except model and engine, as text) -> value."""
    samples = samples_of(server)
    assert {sample.labels["model_name"] for sample in samples} == {MODEL}
    for sample in samples:
        assert sample.labels.get("engine") == ("0" if sample.name.startswith("vllm:") else None)
    own = ("model_name", "engine")
    return {
        (sample.name, ",".join(f"{k}={v}" for k, v in sample.labels.items() if k not in own)): sample.value
        for sample in samples
    }


def test_what_vllms_dashboards_read_is_there_with_its_type(server: FakeServer):
    families = {f.name: f for f in text_string_to_metric_families(server.client.get("/metrics").text)}
    assert {name: families[name].type for name in VLLM_FAMILIES if name in families} == VLLM_FAMILIES
    [config] = families["vllm:cache_config_info"].samples
    assert config.value == 1
    assert config.labels.keys() >= CACHE_LABELS
    info = server.engine.info
    assert config.labels["num_gpu_blocks"] == str(info.num_blocks)
    assert config.labels["block_size"] == str(info.block_size)
    states = {s.labels["sleep_state"]: s.value for s in families["vllm:engine_sleep_state"].samples}
    assert states == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}


def test_parameters_gaps_and_steps_are_counted():
    with fake_server(has_eos=False, step_s=0.002) as server:
        body = {"model": MODEL, "prompt": "a" * 40, "max_tokens": 8}
        assert server.post("/v1/completions", body).status_code == 200
        assert server.post("/v1/completions", {**body, "n": 3, "max_tokens": 5}).status_code == 200
        until(lambda: server.engine.stats().num_running == 0)
        found = scrape(server)
        steps = server.engine.stats()
    assert found["vllm:request_params_n_sum", ""] == 1 + 3
    assert found["vllm:request_params_n_bucket", "le=1"] == 1
    assert found["vllm:request_params_max_tokens_sum", ""] == 8 + 5
    assert found["vllm:request_max_num_generation_tokens_sum", ""] == 8 + 5
    assert found["vllm:inter_token_latency_seconds_count", ""] == 7 + 3 * 4
    num_cached = found["vllm:prompt_tokens_cached_total", ""]
    assert found["vllm:request_prefill_kv_computed_tokens_sum", ""] == 4 * 40 - num_cached < 4 * 40
    assert found["vllm:iteration_tokens_total_count", ""] == steps.total_steps
    computed = 4 * 40 - steps.total_cached_tokens + 7 + 3 * 4
    assert found["vllm:iteration_tokens_total_sum", ""] == computed
    parts = ("prefill", "decode")
    whole = sum(found[f"vllm:request_{part}_time_seconds_sum", ""] for part in parts)
    assert found["vllm:request_inference_time_seconds_sum", ""] == pytest.approx(whole)
    assert found["vllm:request_inference_time_seconds_count", ""] == 2


def test_requests_that_wait_are_told_apart_and_adapters_named(tmp_path):
    make_adapter(tmp_path / "sql", TINY_SHAPES, 1)
    options = WireOptions(lora_root=tmp_path)
    with fake_server(has_eos=False, step_s=0.005, max_link_num=1, options=options) as server:
        load = {"lora_name": "sql", "lora_path": "sql"}
        assert server.post("/v1/load_lora_adapter", load).status_code == 200
        body = {"model": "sql", "prompt": "hi", "max_tokens": 1500, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as running:
            lines = running.iter_lines()  # keep a reference: closing the stream would cancel the request
            next(lines)
            with httpx.Client(base_url=server.url) as other, ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(other.post, "/v1/completions", json={**body, "model": MODEL, "stream": False})
                until(lambda: server.admission.num_waiting == 1)
                until(lambda: server.engine.stats().decode_step_s > 0)
                found = scrape(server)
                [lora] = [s for s in samples_of(server) if s.name == "vllm:lora_requests_info"]
                for model in server.health.models:
                    for item in model.running():
                        model.stop(item.generation.id)
                assert waiting.result().status_code == 200
    assert found["decode_step_seconds", ""] == pytest.approx(0.005, rel=0.1)
    assert 0 <= found["prompt_token_seconds", ""] < 0.005
    reason = "vllm:num_requests_waiting_by_reason"
    assert (found[reason, "reason=capacity"], found[reason, "reason=deferred"]) == (1, 0)
    assert found["vllm:num_requests_waiting", ""] == 1
    assert (lora.labels["running_lora_adapters"], lora.labels["waiting_lora_adapters"]) == ("sql", "")
    assert lora.labels["max_lora"] == "64"


def test_what_ran_is_what_it_says():
    with fake_server(has_eos=False, step_s=0.002, max_link_num=1) as server:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 8}
        for _ in range(2):
            assert server.post("/v1/completions", body).status_code == 200
        assert server.post("/v1/completions", {**body, "n": 2, "stream": True}).status_code == 200
        assert server.post("/v1/completions", {**body, "prompt": [9999]}).status_code == 400
        server.leave("/v1/completions", {**body, "max_tokens": 1500})
        until(lambda: scrape(server)["request_aborted_total", ""] == 1)
        found = scrape(server)
    assert found["request_received_total", ""] == 5
    assert found["request_success_total", ""] == 3
    assert found["request_failed_total", ""] == 1
    assert found["request_aborted_total", ""] == 1
    assert found["vllm:request_success_total", "finished_reason=length"] == 4
    for prefix in ("", "vllm:"):
        assert found[prefix + "request_generation_tokens_sum", ""] == 8 + 8 + 16
        assert found[prefix + "time_to_first_token_seconds_count", ""] == 4  # one left after a token
        assert found[prefix + "generation_tokens_total", ""] >= 32
    assert found["time_per_output_token_seconds_count", ""] == 3  # means over requests
    assert found["vllm:request_time_per_output_token_seconds_count", ""] == 3
    assert found["request_prompt_tokens_bucket", "le=8"] == 3
    assert found["vllm:prefix_cache_hits_total", ""] <= found["vllm:prefix_cache_queries_total", ""]
    assert found["vllm:kv_cache_usage_perc", ""] == found["npu_cache_usage_perc", ""] < 1


def test_a_value_on_a_bound_is_counted_below_it():
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 3):
        histogram.add(value)
    assert histogram.cumulative() == [("1", 2), ("2", 4), ("+Inf", 5)]
    assert histogram.mean == 1.6


def test_throughput_is_of_the_last_seconds_however_often_one_looks():
    often, seldom = Throughput(0.0), Throughput(0.0)
    assert often.rate(2.0, 20) == seldom.rate(2.0, 20) == 10
    for tenth in range(21, 600):
        often.rate(tenth / 10, 20)
    assert often.rate(60.0, 120) == pytest.approx(10, rel=0.15)  # 100 more in the last 10 s
    assert seldom.rate(60.0, 120) == pytest.approx(100 / 58)  # since the previous scrape
    assert often.rate(80.0, 0) == 0  # a new engine counts from 0
