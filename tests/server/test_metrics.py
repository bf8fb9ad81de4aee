"""/metrics through Prometheus' own parser: what ran is what it says."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvloom.server.meter import Histogram, Throughput
from tests.support.servers import MODEL, FakeServer, fake_server
from tests.support.waiting import until


def scrape(server: FakeServer) -> dict[tuple[str, str], float]:
    """(sample name, its labels but the model's as text) -> value."""
    text = server.client.get("/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert {sample.labels["model_name"] for sample in samples} == {MODEL}
    return {
        (sample.name, ",".join(f"{k}={v}" for k, v in sample.labels.items() if k != "model_name")): sample.value
        for sample in samples
    }


def test_what_ran_is_what_it_says():
    with fake_server(has_eos=False, step_s=0.002, max_link_num=1) as server:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 8}
        for _ in range(2):
            assert server.post("/v1/completions", body).status_code == 200
        assert server.post("/v1/completions", {**body, "n": 2, "stream": True}).status_code == 200
        assert server.post("/v1/completions", {**body, "prompt": [9999]}).status_code == 400
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/v1/completions", json={**body, "max_tokens": 1500}, timeout=0.2)
        until(lambda: scrape(server)["request_aborted_total", ""] == 1)
        found = scrape(server)
    assert found["request_received_total", ""] == 5
    assert found["request_success_total", ""] == 3
    assert found["request_failed_total", ""] == 1
    assert found["request_aborted_total", ""] == 1
    assert found["vllm:request_success_total", "finished_reason=length"] == 4
    for prefix in ("", "vllm:"):
        assert found[prefix + "request_generation_tokens_sum", ""] == 8 + 8 + 16
        assert found[prefix + "time_to_first_token_seconds_count", ""] == 4  # one left after its first token
        assert found[prefix + "generation_tokens_total", ""] >= 32
        assert found[prefix + "time_per_output_token_seconds_count", ""] == 3
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
    assert seldom.rate(60.0, 120) == pytest.approx(100 / 58)  # since the look before
    assert often.rate(80.0, 0) == 0  # a new engine counts from 0
