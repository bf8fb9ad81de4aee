"""Sleep: weights are released and loaded again, what happens to requests meanwhile, and what every route answers."""

import json
import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from kvloom.contract.errors import ModelError
from kvloom.server.serving.options import WireOptions
from tests.support.configs import mock_document
from tests.support.models.adapters import TINY_SHAPES, make_adapter
from tests.support.processes import ServeProcess, serve
from tests.support.servers import MODEL, FakeServer, fake_server
from tests.support.waiting import until

GREEDY = {"model": MODEL, "prompt": "the quick brown fox", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
ASLEEP = f"the model {MODEL} is asleep; POST /wake_up wakes it"


def is_sleeping(server: FakeServer) -> bool:
    return bool(server.client.get("/is_sleeping").json()["is_sleeping"])


def states(server: FakeServer) -> dict[str, str]:
    rows = [line for line in server.client.get("/metrics").text.split("\n") if "engine_sleep_state{" in line]
    return {row.split('sleep_state="')[1].split('"')[0]: row.split()[-1] for row in rows}


def test_a_model_sleeps_refuses_and_wakes_with_the_same_answers(server: FakeServer):
    before = server.post("/v1/completions", GREEDY).json()["choices"][0]["text"]
    for level, state in (("1", "weights_offloaded"), ("2", "discard_all")):
        for _ in range(2):  # the second call has no effect
            assert server.post(f"/sleep?level={level}").status_code == 200
        assert is_sleeping(server)
        assert states(server) == {"awake": "0.0", "weights_offloaded": "0.0", "discard_all": "0.0"} | {state: "1.0"}
        refused = server.post("/v1/completions", GREEDY)
        assert (refused.status_code, refused.json()["error"]["message"]) == (503, ASLEEP)
        assert refused.headers["retry-after"]
        assert server.post("/reset_prefix_cache").json() == {"success": True}
        for _ in range(2):
            assert server.post("/wake_up?tags=weights").status_code == 200
        assert not is_sleeping(server)
        assert states(server)["awake"] == "1.0"
        again = server.post("/v1/completions", GREEDY).json()
        assert again["choices"][0]["text"] == before
        assert again["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0) == 0


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/health", None, 503),
        ("GET", "/healthz", None, 503),
        ("GET", "/readyz", None, 503),
        ("POST", "/ping", None, 503),
        ("GET", "/v2/health/ready", None, 503),
        ("GET", f"/v2/models/{MODEL}/ready", None, 503),
        ("GET", "/health/timed-1", None, 503),
        ("GET", "/livez", None, 200),
        ("GET", "/v2/health/live", None, 200),
        ("GET", "/v1/models", None, 200),
        ("POST", "/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}, 503),
        ("POST", "/v1/completions", {**GREEDY, "stream": True}, 503),
        ("POST", "/v1/responses", {"model": MODEL, "input": "hi"}, 503),
        (
            "POST",
            "/v1/messages",
            {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
            529,
        ),
        ("POST", "/v1/embeddings", {"model": MODEL, "input": "hi"}, 503),
        ("POST", "/generate", {"inputs": "hi"}, 503),
        ("POST", "/generate_stream", {"inputs": "hi"}, 503),
        ("POST", f"/v2/models/{MODEL}/generate", {"text_input": "hi"}, 503),
        ("POST", "/infer", {"inputs": "hi"}, 503),
        ("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "a"}, 503),
    ],
)
def test_every_route_says_so(asleep: FakeServer, method: str, path: str, body: object, status: int):
    response = asleep.client.request(method, path, json=body)
    assert response.status_code == status
    assert status == 200 or "asleep" in response.text


@pytest.fixture(scope="module")
def asleep(tmp_path_factory):
    root = tmp_path_factory.mktemp("lora")
    make_adapter(root / "a", TINY_SHAPES, 1)
    with fake_server(options=WireOptions(lora_root=root)) as server:
        assert server.post("/sleep").status_code == 200
        [entry] = server.post("/v2/repository/index", {}).json()
        assert (entry["state"], entry["reason"]) == ("UNAVAILABLE", ASLEEP)
        assert server.post("/v2/repository/index", {"ready": True}).json() == []
        yield server


def ask(server: FakeServer, **fields: object) -> httpx.Response:
    return httpx.post(server.url + "/v1/completions", json={**GREEDY, **fields}, timeout=120)


def going_to_sleep(server: FakeServer, query: str, pool: ThreadPoolExecutor) -> "Future[httpx.Response]":
    """A call of sleep, up to the moment at which requests are refused because of it."""
    asked = pool.submit(httpx.post, f"{server.url}/sleep{query}", timeout=120)
    until(lambda: server.client.get("/health").status_code == 503)
    return asked


def test_what_runs_and_waits_is_finished_first_and_what_comes_is_refused():
    with fake_server(has_eos=False, step_s=0.005, max_link_num=1) as server, ThreadPoolExecutor(8) as pool:
        running = [pool.submit(ask, server, max_tokens=60) for _ in range(3)]  # two of them are queued
        until(lambda: server.admission.num_active == 3)
        asked = going_to_sleep(server, "?mode=wait", pool)
        late = ask(server)
        assert (late.status_code, "is being put to sleep" in late.text) == (503, True)
        assert [len(r.result().json()["choices"][0]["text"]) for r in running] == [60] * 3
        assert asked.result().status_code == 200
        assert is_sleeping(server)


def test_abort_ends_what_runs_with_what_it_has_also_for_who_waits_already():
    with fake_server(has_eos=False, step_s=0.005) as server, ThreadPoolExecutor(8) as pool:
        running = pool.submit(ask, server, max_tokens=1900)
        until(lambda: server.engine.stats().num_running == 1)
        waits = going_to_sleep(server, "", pool)
        assert server.post("/sleep?mode=abort&level=2").status_code == 200
        assert waits.result().status_code == 200
        answer = running.result().json()
        assert answer["usage"]["completion_tokens"] < 1900
        assert server.post("/wake_up").status_code == 200
        assert ask(server).status_code == 200
        unhurried = pool.submit(ask, server, max_tokens=60)
        until(lambda: server.engine.stats().num_running == 1)
        assert server.post("/sleep").status_code == 200  # sleep no longer waits for anything
        assert unhurried.result().json()["usage"]["completion_tokens"] == 60


def test_many_calls_at_once_end_in_one_state():
    with fake_server() as server, ThreadPoolExecutor(16) as pool:
        calls = [f"{server.url}/{name}" for name in ("sleep", "wake_up", "sleep?level=2", "wake_up") * 8]
        statuses = {future.result().status_code for future in [pool.submit(httpx.post, c, timeout=120) for c in calls]}
        assert statuses == {200}
        server.post("/wake_up")
        assert ask(server).status_code == 200
        server.post("/sleep")
        assert ask(server).status_code == 503


def test_a_wake_up_that_fails_says_why_and_the_next_one_may_work(server: FakeServer):
    server.post("/sleep")
    server.executor.failing.append(ModelError("the model process was killed by signal 9"))
    failed = server.post("/wake_up")
    assert failed.status_code == 500
    assert "it sleeps on: the model process was killed by signal 9" in failed.json()["error"]["message"]
    assert is_sleeping(server)
    assert ask(server).status_code == 503
    server.executor.failing.append(ValueError("a bug"))
    assert server.post("/wake_up").status_code == 500
    assert server.post("/wake_up").status_code == 200
    assert ask(server).status_code == 200


def test_one_of_two_models_sleeps(tmp_path):
    document = mock_document()
    models = document["ModelDeployParam"]["ModelParam"]
    models[0]["modelName"] = "first"
    models.append({**models[0], "modelName": "second"})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(document))
    path.chmod(0o600)
    with serve("--config", str(path)) as process, httpx.Client(base_url=process.url, timeout=120) as client:
        assert client.post("/sleep", params={"model": "other"}).status_code == 404
        assert client.post("/sleep", params={"model": "second"}).status_code == 200
        found = [client.get("/is_sleeping", params={"model": name}).json() for name in ("first", "second")]
        assert found == [{"is_sleeping": False}, {"is_sleeping": True}]
        assert client.get("/is_sleeping").json() == {"is_sleeping": True}
        bodies = [{**GREEDY, "model": name} for name in ("first", "second")]
        assert [client.post("/v1/completions", json=body).status_code for body in bodies] == [200, 503]
        assert client.get("/health").status_code == 503
        assert client.post("/wake_up").status_code == 200
        assert client.get("/health").status_code == 200


def test_a_server_that_stops_answers_who_waits():
    with fake_server() as server, ThreadPoolExecutor(2) as pool:
        server.post("/sleep")
        server.engine.close()
        assert server.post("/wake_up").status_code == 503
        assert pool.submit(ask, server).result().status_code == 503


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/sleep?level=3", "level"),
        ("/sleep?level=one", "level"),
        ("/sleep?level=", "level"),
        ("/sleep?mode=keep", "mode"),
        ("/wake_up?tags=all", "tags"),
        ("/reset_prefix_cache?reset_running_requests=2", "reset_running_requests"),
        ("/reset_prefix_cache?reset_external=", "reset_external"),
    ],
)
def test_a_wrong_option_is_a_400_by_name_and_changes_nothing(server: FakeServer, path: str, param: str):
    reply = server.post(path)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert not is_sleeping(server)


# -- ranks


def children(process: ServeProcess) -> set[int]:
    """The model's processes."""
    found = set()
    for task in Path(f"/proc/{process.process.pid}/task").iterdir():
        found |= set(map(int, (task / "children").read_text().split()))
    return {pid for pid in found if b"kvloom.rank.main" in Path(f"/proc/{pid}/cmdline").read_bytes()}


def test_the_ranks_end_and_others_come_back_with_their_adapters(tmp_path):
    for seed, name in enumerate(("a", "b", "c")):
        make_adapter(tmp_path / name, TINY_SHAPES, seed)
    options = ("--backend", "fake", "--lora-modules", f"a={tmp_path / 'a'}", "--lora-root", str(tmp_path))
    with serve(*options) as process, httpx.Client(base_url=process.url, timeout=120) as client:
        for name in ("b", "c"):
            assert client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": name}).status_code == 200
        model = client.get("/v1/models").json()["data"][0]["id"]

        def answers() -> list[str]:
            bodies = [{**GREEDY, "model": name} for name in (model, "a", "b")]
            return [client.post("/v1/completions", json=body).json()["choices"][0]["text"] for body in bodies]

        before, ranks = answers(), children(process)
        assert len(ranks) == 1
        assert client.post("/sleep").status_code == 200
        assert children(process) == set()
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "c"}).status_code == 200
        assert client.post("/wake_up").status_code == 200
        assert children(process).isdisjoint(ranks)
        assert answers() == before
        assert client.post("/v1/completions", json={**GREEDY, "model": "c"}).status_code == 404
        restarts = process.num_restarts()
        os.kill(children(process).pop(), signal.SIGKILL)  # after waking, a crash is repaired as usual
        until(lambda: process.num_restarts() == restarts + 1)
        until(lambda: client.get("/health").status_code == 200, 60)
        assert answers() == before
        client.post("/sleep")
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(120) == 0
