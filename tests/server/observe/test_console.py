"""The console's routes: the page, its feed, cancelling requests, and who has access."""

import json
import threading
from pathlib import Path

import httpx
import pytest

from kvloom.contract.config import EngineConfig, TierConfig
from kvloom.net.tlsconfig import TlsConfig
from kvloom.server.config.settings import ServerConfig
from kvloom.server.config.view import config_view
from kvloom.server.dialects.operators.console import FILES, OPEN_PATHS
from kvloom.server.secure.api_keys import new_key
from kvloom.server.serving.card import ModelCard
from tests.server.run.test_daemon import DAEMON, install
from tests.support.ports import free_port
from tests.support.processes import serving
from tests.support.servers import MODEL, FakeServer, fake_server
from tests.support.waiting import until

MAX_PAGE_BYTES = 64 << 10
SECRET_PROMPT = "nobody may read this"


def row_of(server: FakeServer) -> dict[str, object]:
    """The row of the only running request, once it generates."""
    until(lambda: any(row["generated"] for row in server.client.get("/console/feed").json()["requests"]))
    [row] = server.client.get("/console/feed").json()["requests"]
    return row


def test_a_browser_is_sent_to_the_page_and_others_are_not(server: FakeServer):
    browser = {"Accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"}
    sent = server.client.get("/", headers=browser)
    assert (sent.status_code, sent.headers["location"]) == (303, "console")
    assert server.client.get("/", headers=browser, follow_redirects=True).text.startswith("<!doctype html>")
    for accept in ("*/*", "application/json"):
        health = server.client.get("/", headers={"Accept": accept})
        assert (health.status_code, health.text) == (200, "Ollama is running")
    answer = server.post("/", {"inputs": "hi"}, headers=browser)
    assert isinstance(answer.json(), list)


def test_the_page_is_small_and_may_load_nothing_from_elsewhere(server: FakeServer):
    assert sum(len(body) for body, _ in FILES.values()) < MAX_PAGE_BYTES
    for path in OPEN_PATHS:
        response = server.client.get(path)
        assert response.status_code == 200
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "innerHTML" not in response.text
        assert "://" not in response.text.replace("http://www.w3.org/2000/svg", "")
    assert server.client.get("/console/nothing.js").json() == {
        "error": "there is no route /console/nothing.js",
        "error_type": "validation",
    }


def test_the_feed_tells_what_runs_but_not_what_it_says():
    with fake_server(has_eos=False, step_s=0.01, max_link_num=1) as server:
        with server.client.stream(
            "POST",
            "/v1/completions",
            json={"model": MODEL, "prompt": SECRET_PROMPT, "max_tokens": 1000, "stream": True},
        ) as answer:
            row = row_of(server)
            waiting = threading.Thread(target=lambda: server.complete(SECRET_PROMPT, max_tokens=1))
            waiting.start()
            until(lambda: server.client.get("/console/feed").json()["num_queued"] == 1)
            feed = server.client.get("/console/feed")
            assert [one["state"] for one in feed.json()["requests"]] == ["decode", "queued"]
            assert SECRET_PROMPT not in feed.text
            assert row["prompt_tokens"] == len(SECRET_PROMPT)
            assert row["model"] == MODEL
            assert row["client"] == ""
            [figures] = feed.json()["models"]
            assert figures["num_running"] == 1
            assert figures["num_free_blocks"] < figures["num_blocks"]
            answer.close()
        waiting.join()
        until(lambda: server.client.get("/console/feed").json()["requests"] == [])
        assert server.client.get("/console/feed").json()["models"][0]["output_tokens"] > 1


def test_a_cancel_ends_the_answer_once_with_what_it_has():
    with fake_server(has_eos=False, step_s=0.01) as server:
        answers: list[httpx.Response] = []
        client = threading.Thread(target=lambda: answers.append(server.chat(max_tokens=1500)))
        client.start()
        row = row_of(server)
        with httpx.Client(base_url=server.url) as other:
            assert other.delete(f"/console/requests/{row['id']}").json() == {"id": row["id"]}
            client.join()
            [answer] = answers
            assert answer.json()["choices"][0]["finish_reason"] == "stop"
            assert 0 < answer.json()["usage"]["completion_tokens"] < 1500
            gone = other.delete(f"/console/requests/{row['id']}")
        assert (gone.status_code, gone.json()["error"]) == (404, f"no request {row['id']!r} is running")
        assert server.client.get("/console/feed").json()["requests"] == []


@pytest.mark.parametrize("id", [".", "..", "a:b"])
def test_a_request_of_any_id_can_be_ended_as_the_page_does(id):
    with fake_server(has_eos=False, step_s=0.01) as server:
        ended: list[httpx.Response] = []

        def ask() -> None:
            body = {"id": id, "text_input": "x", "parameters": {"max_new_tokens": 1500}}
            with httpx.Client(base_url=server.url, timeout=60) as own:
                ended.append(own.post(f"/v2/models/{MODEL}/generate", json=body))

        client = threading.Thread(target=ask)
        client.start()
        row = row_of(server)
        with httpx.Client(base_url=server.url) as other:
            assert other.delete("/console/requests", params={"id": row["id"]}).json() == {"id": row["id"]}
        client.join()
        assert (row["id"], ended[0].status_code) == (id, 200)


def test_the_data_wants_the_key_and_the_page_does_not():
    key = new_key()
    with fake_server(keys=[key], has_eos=False, step_s=0.01) as server:
        assert server.client.get("/console").status_code == 200
        assert server.client.get("/", headers={"Accept": "text/html"}).status_code == 303
        assert server.client.get("/").status_code == 401
        for method, path in (("GET", "feed"), ("GET", "config"), ("DELETE", "requests/x")):
            assert server.client.request(method, f"/console/{path}").status_code == 401
        server.client.headers["Authorization"] = f"Bearer {key}"
        with server.client.stream(
            "POST", "/generate_stream", json={"inputs": "hi", "parameters": {"max_new_tokens": 999}}
        ):
            row = row_of(server)
        assert len(str(row["client"])) == 8
        assert server.client.get("/console/config").status_code == 200


def test_the_data_is_on_the_management_port_and_the_page_on_both(tmp_path: Path):
    management = free_port()
    with serving([*DAEMON, "--config", str(install(tmp_path, managementPort=management))]) as daemon:
        other = f"http://127.0.0.1:{management}"
        for base in (daemon.url, other):
            assert httpx.get(base + "/console").text.startswith("<!doctype html>")
            assert httpx.get(base + "/console/main.js").status_code == 200
        assert httpx.get(other + "/console/feed").status_code == 200
        assert httpx.get(daemon.url + "/console/feed").status_code == 404
        assert httpx.get(daemon.url + "/console/config").status_code == 404
        assert httpx.get(other + "/console/config").json()["server"]["management"] == f"127.0.0.1:{management}"


def test_the_configuration_is_shown_without_secrets(server: FakeServer):
    shown = server.client.get("/console/config").json()
    assert shown["server"]["max_link_num"] == 300
    assert shown["models"][0]["num_blocks"] == 512  # measured, not configured
    secret = Path("/secret")
    tls = TlsConfig((Path("/ca.pem"),), Path("/cert.pem"), secret, secret, secret, secret, ())
    options = {"socket": "/run/pool.sock", "access_id": "secret-id", "access_key_file": "/secret/key"}
    engine = EngineConfig(backend="fake", kv_tier=TierConfig("a.b:c", 0.5, options))
    card = ModelCard("m", engine, prompts={"query": "Represent: ", "passage": ""})
    view = config_view(ServerConfig((card,), tls=tls, api_key_hashes=("sha256$secret$secret",)))
    assert view["models"][0]["prompts"] == "query: Represent: , passage: ", "text, as every value is"
    assert "secret" not in json.dumps(view)
    assert view["keys"]["max_link_num"] == "maxLinkNum"
    assert view["server"]["api_keys"] == 1
    assert view["server"]["tls_key"] == "set"
    assert view["models"][0]["kv_pool_socket"] == "/run/pool.sock"
    assert view["models"][0]["kv_pool_access_key_file"] == "set"


@pytest.mark.parametrize("name", ["index.html", "style.css", "main.js"])
def test_the_page_comes_with_its_types(server: FakeServer, name: str):
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
    kind = server.client.get(f"/console/{name}").headers["content-type"]
    assert kind == f"{kinds[name.rsplit('.')[-1]]}; charset=utf-8"
