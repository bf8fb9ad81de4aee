"""The routes of SGLang's server that its routers call."""

from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.support.servers import MODEL, fake_server
from tests.support.waiting import until

TEXT = {"model": MODEL, "prompt": "a" * 100, "max_tokens": 80, "temperature": 0}


def test_the_load_counts_who_runs_who_waits_and_the_tokens_they_hold():
    with fake_server(has_eos=False, step_s=0.005, max_link_num=2) as server, ThreadPoolExecutor(3) as pool:

        def load() -> tuple[int, int, bool]:
            [told] = server.client.get("/get_load").json()
            return told["num_reqs"], told["num_waiting_reqs"], told["num_tokens"] >= 100

        assert load() == (0, 0, False)
        asked = [pool.submit(httpx.post, server.url + "/v1/completions", json=TEXT, timeout=120) for _ in range(3)]
        until(lambda: load() == (3, 1, True))
        assert [one.result().status_code for one in asked] == [200] * 3
        until(lambda: load()[0] == 0)


def test_a_flush_forgets_prefixes_and_disturbs_nobody():
    with fake_server(has_eos=False, step_s=0.002) as server, ThreadPoolExecutor(1) as pool:

        def cached() -> int:
            usage = server.post("/v1/completions", {**TEXT, "max_tokens": 1}).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        expected = server.post("/v1/completions", TEXT).json()["choices"]
        running = pool.submit(httpx.post, server.url + "/v1/completions", json=TEXT, timeout=120)
        until(lambda: server.engine.stats().num_running == 1)
        assert cached() == 99
        assert server.post("/flush_cache").text == "Cache flushed.\n"
        assert cached() == 0
        assert running.result().json()["choices"] == expected
        assert server.client.get("/flush_cache").status_code == 405  # any web page can send a GET


def test_health_by_a_token_is_503_of_a_model_that_gives_none():
    with fake_server() as server:
        assert server.client.get("/health_generate").status_code == 200
        server.health.is_draining = True
        assert server.client.get("/health_generate").status_code == 503


def test_model_and_limits_are_told_by_the_names_of_sglang():
    with fake_server() as server:
        facts = server.client.get("/get_server_info").json()
        assert (facts["served_model_name"], facts["tp_size"], facts["dp_size"]) == (MODEL, 1, 1)
        assert facts["context_length"] == server.engine.max_seq_len
        assert facts["max_total_num_tokens"] == server.engine.info.num_blocks * server.engine.info.block_size
        assert server.client.get("/model_info").json() == server.client.get("/get_model_info").json()


def test_rendered_tokens_are_those_that_run():
    with fake_server() as server:
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "return_token_ids": True}
        rendered = server.post("/v1/chat/completions/render", chat).json()
        assert rendered["model"] == MODEL
        assert rendered["token_ids"] == server.post("/v1/chat/completions", chat).json()["prompt_token_ids"]
        texts = {"model": MODEL, "prompt": ["hi", [1, 2]]}
        assert server.post("/v1/completions/render", texts).status_code == 400  # of mixed kinds: refused
        texts["prompt"] = ["hi", "ho"]
        assert [each["token_ids"] for each in server.post("/v1/completions/render", texts).json()] == [
            server.post("/tokenize", {"model": MODEL, "prompt": text}).json()["tokens"] for text in ("hi", "ho")
        ]
        assert server.engine.stats().total_requests == 1  # the only chat that was generated
