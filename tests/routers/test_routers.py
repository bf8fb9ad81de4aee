"""sglang-router and vllm-router, as their wheels install them, in front of plain servers without any setup."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import httpx
import pytest

from tests.support.processes import serve
from tests.support.servers import MODEL, FakeServer, fake_server
from tests.support.waiting import until
from tests.support.wire.routers import SGLANG, VLLM, Recorder, router, text_of

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 3}
TEXT = {"model": MODEL, "prompt": "the quick brown fox", "max_tokens": 12, "seed": 3}
BOTH = pytest.mark.parametrize("module", [SGLANG, VLLM], ids=["sglang", "vllm"])
PATHS = pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])


@dataclass(slots=True)
class Routed:
    """A router and the two servers behind it."""

    client: httpx.Client
    servers: list[FakeServer]
    seen: list[Recorder]

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    def refused(self) -> list[tuple[str, str, int]]:
        """(method, path, status) of the requests that the servers did not answer with 200."""
        return [each for seen in self.seen for each in seen.asked if each[2] != 200]


@contextmanager
def routed(module: str) -> Iterator[Routed]:
    """Two servers behind the router with its policy "cache_aware", the default of both routers."""
    seen = [Recorder(), Recorder()]
    with ExitStack() as stack:
        servers = [stack.enter_context(fake_server(wrap=each.wrap)) for each in seen]
        urls = [server.url for server in servers]
        client = stack.enter_context(router(module, "--policy", "cache_aware", "--worker-urls", *urls))
        yield Routed(client, servers, seen)


@pytest.fixture(scope="module")
def sglang() -> Iterator[Routed]:
    with routed(SGLANG) as made:
        yield made


@pytest.fixture(scope="module")
def sglang_parted() -> Iterator[httpx.Client]:
    """A client of SGLang's router, which sends both servers the whole request at once, with a `bootstrap_room`."""
    with fake_server() as one, fake_server() as two:
        arguments = ("--pd-disaggregation", "--prefill", one.url, "8998", "--decode", two.url)
        with router(SGLANG, *arguments) as client:
            yield client


@pytest.fixture(scope="module")
def vllm() -> Iterator[Routed]:
    with routed(VLLM) as made:
        yield made


@pytest.fixture(params=["sglang", "vllm"])
def made(request: pytest.FixtureRequest) -> Routed:
    found: Routed = request.getfixturevalue(request.param)
    for seen in found.seen:
        seen.asked = [each for each in seen.asked if each[2] == 200]  # other tests cause errors on purpose
    return found


@PATHS
def test_answers_through_a_router_are_those_of_a_server(made: Routed, path: str, body: dict[str, object]):
    def told(answer: httpx.Response) -> dict[str, object]:
        assert answer.status_code == 200, answer.text
        return {name: answer.json()[name] for name in ("object", "model", "choices")}

    direct = made.servers[0].post(path, body)
    whole, events = made.client.post(path, json=body), made.client.post(path, json={**body, "stream": True})
    assert told(whole) == told(direct)
    assert events.headers["content-type"].startswith("text/event-stream")
    assert text_of(events.text) == text_of(made.servers[0].post(path, {**body, "stream": True}).text)
    assert events.text.endswith("data: [DONE]\n\n")
    assert made.refused() == []


def test_what_a_router_tells_of_its_workers_comes_from_them(made: Routed):
    assert [card["id"] for card in made.client.get("/v1/models").json()["data"]] == [MODEL]
    info = made.client.get("/get_model_info").json()
    assert (info["model_path"], info["is_generation"]) == (MODEL, True)
    assert made.client.get("/get_server_info").status_code == 200
    assert made.client.get("/health_generate").status_code == 200
    assert {load["worker"] for load in made.client.get("/get_loads").json()["workers"]} == set(made.urls)
    assert made.client.post("/flush_cache").status_code == 200
    assert made.refused() == []


def test_sglangs_router_knows_name_and_load_of_each_worker(sglang: Routed):
    workers = sglang.client.get("/workers").json()["workers"]
    assert {(worker["url"], worker["model_id"], worker["is_healthy"]) for worker in workers} == {
        (url, MODEL, True) for url in sglang.urls
    }
    assert [load["load"] for load in sglang.client.get("/get_loads").json()["workers"]] == [0, 0]


def test_vllms_router_takes_a_prompt_in_tokens_and_asks_no_second_way(vllm: Routed):
    before = [len(seen.asked) for seen in vllm.seen]
    assert vllm.client.post("/v1/chat/completions", json=CHAT).status_code == 200
    paths = {path for seen, start in zip(vllm.seen, before, strict=True) for _, path, _ in seen.asked[start:]}
    assert paths - {"/health"} == {"/v1/chat/completions/render", "/v1/chat/completions"}


def test_prompts_that_begin_alike_meet_on_one_server(made: Routed):
    made.client.post("/flush_cache")
    counts = []
    for number in range(6):
        prompt = "you are an assistant that answers briefly and well. " * 8 + f"question {number}"
        answer = made.client.post("/v1/completions", json={**TEXT, "prompt": prompt})
        counts.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert all(count >= 400 for count in counts[1:]), counts


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_error_comes_through_with_its_status_and_its_words(made: Routed, is_stream: bool):
    body = {**TEXT, "prompt": "x" * 3000, "stream": is_stream}
    direct, answer = made.servers[0].post("/v1/completions", body), made.client.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()) == (direct.status_code, direct.json()) == (400, direct.json())


def test_workers_join_and_leave_vllms_router(vllm: Routed):
    with fake_server() as third:
        assert vllm.client.post("/add_worker", params={"url": third.url}).status_code == 200
        assert set(vllm.client.get("/list_workers").json()["urls"]) == {*vllm.urls, third.url}
        assert vllm.client.post("/remove_worker", params={"url": third.url}).status_code == 200
        assert set(vllm.client.get("/list_workers").json()["urls"]) == set(vllm.urls)


def test_workers_join_and_leave_sglangs_router(sglang: Routed):
    def urls() -> dict[str, str]:
        return {worker["url"]: worker["id"] for worker in sglang.client.get("/workers").json()["workers"]}

    with fake_server() as third:
        assert sglang.client.post("/workers", json={"url": third.url}).status_code == 202
        until(lambda: third.url in urls())
        assert sglang.client.delete(f"/workers/{urls()[third.url]}").status_code == 202
        until(lambda: set(urls()) == set(sglang.urls))


@BOTH
def test_a_killed_server_costs_no_later_request(module: str):
    with ExitStack() as stack:
        one, other = stack.enter_context(serve("--backend", "fake")), stack.enter_context(fake_server())
        arguments = ("--policy", "round_robin", "--worker-urls", one.url, other.url)
        client = stack.enter_context(router(module, *arguments))
        assert [client.post("/v1/completions", json=TEXT).status_code for _ in range(2)] == [200, 200]
        one.process.kill()
        one.process.wait()
        answers = [client.post("/v1/completions", json=TEXT) for _ in range(6)]
        assert [answer.status_code for answer in answers] == [200] * 6
        assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1


@PATHS
def test_sglangs_own_way_of_parting_prefill_and_decode_is_refused_by_name(sglang_parted: httpx.Client, path, body):
    answer = sglang_parted.post(path, json=body)
    assert answer.status_code == 400
    assert "bootstrap_host: is not supported; servers for prompts and for answers are driven by kv_tr" in answer.text
