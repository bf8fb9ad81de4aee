"""Requests that a page of another site can send have no effect, on any route; those of API clients still work."""

import json
import subprocess
from collections.abc import Iterator

import httpx
import pytest

from kvloom.contract.errors import BadRequest
from kvloom.net.sites import Policy, checked_hosts, checked_origins
from kvloom.server.config.settings import ServerConfig, Settings
from kvloom.server.errors import family_of
from kvloom.server.http.reply import Endpoint
from kvloom.server.run.guards import policy_of
from kvloom.server.run.mount import make_dialects
from kvloom.server.secure.api_keys import hash_key, new_key
from tests.server.run.test_daemon import DAEMON, generate, install
from tests.support.ports import free_port
from tests.support.processes import serve, serving
from tests.support.servers import MODEL, FakeServer, fake_server

PAGES = ("/", "/console", "/docs")
SENT_BY_PAGES = {
    "a foreign name": (421, {"Host": "evil.example"}),
    "a name that contains ours": (421, {"Host": "127.0.0.1.evil.example"}),
    "an image or a script": (403, {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}),
    "another port of this machine": (403, {"Sec-Fetch-Site": "same-site"}),
    "a browser that tells the origin only": (403, {"Origin": "https://evil.example"}),
    "a sandboxed frame": (403, {"Origin": "null"}),
    "a link": (403, {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}),
}
FORM_TYPES = ("text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x")


def endpoints() -> list[Endpoint]:
    """All routes, taken from the application, so that new ones are tested too."""
    with fake_server() as server:
        dialects = make_dialects(server.health.models, server.health, None, ServerConfig(()))
        return [endpoint for dialect in dialects for endpoint in dialect.endpoints]


ENDPOINTS = endpoints()
HAVE_EFFECTS = [endpoint for endpoint in ENDPOINTS if endpoint.method != "GET"]


def name_of(endpoint: Endpoint) -> str:
    return f"{endpoint.method} {endpoint.path}"


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running


def ask(server: FakeServer, endpoint: Endpoint, headers: dict[str, str], body: bytes | None = None) -> httpx.Response:
    path = endpoint.path.replace("{name:path}", MODEL).replace("{name}", MODEL).replace("{id:path}", "r")
    return server.client.request(endpoint.method, path.replace("{seconds}", "5"), headers=headers, content=body)


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=name_of)
def test_no_route_answers_what_a_page_of_another_site_sends(server, endpoint):
    for name, (status, headers) in SENT_BY_PAGES.items():
        if name == "a link" and endpoint.method == "GET" and endpoint.path in PAGES:
            continue
        answer = ask(server, endpoint, headers, b"{}" if endpoint.method == "POST" else None)
        assert answer.status_code == status, name
        assert "access-control-allow-origin" not in answer.headers
        error = answer.json()["error"]
        assert isinstance(error, str) is (family_of(endpoint.path) in ("tgi", "ollama"))
    assert not server.health.is_draining


@pytest.mark.parametrize("endpoint", HAVE_EFFECTS, ids=name_of)
def test_no_route_reads_a_body_that_a_form_can_send(server, endpoint):
    for content_type in FORM_TYPES:
        for body in (b"{}", b'{"inputs": "hi"}', b""):
            for mark in ({"Origin": server.url}, {"Sec-Fetch-Site": "same-origin"}, {}):
                is_curl = not mark and content_type == FORM_TYPES[1] and endpoint.path.startswith("/api/")
                status = ask(server, endpoint, {"Content-Type": content_type, **mark}, body).status_code
                assert (status != 415) is is_curl
    assert not server.health.is_draining


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=name_of)
def test_every_route_answers_its_own_page_and_programs(server, endpoint):
    if endpoint.path == "/stopService":
        return
    own = server.url.removeprefix("http://")
    body = b"{}" if endpoint.method == "POST" else None
    typed = {"Content-Type": "application/json"}
    for headers in (
        {"Sec-Fetch-Site": "same-origin", "Origin": server.url, **typed},
        {"Origin": server.url, **typed},
        {"Sec-Fetch-Site": "none", **typed},
        {"Host": own.replace("127.0.0.1", "localhost"), **typed},
        {},
    ):
        assert ask(server, endpoint, headers, body).status_code not in (403, 415, 421)
    if endpoint.path == "/sleep":
        server.client.post("/wake_up").raise_for_status()  # the following tests need it awake


def test_only_the_routes_that_stop_by_get_have_an_effect_by_get():
    """A GET computes one token at most (timed health check); only other methods change the server's state."""
    assert [endpoint.path for endpoint in ENDPOINTS if endpoint.method == "GET" and endpoint.is_generating] == []


def test_a_get_stops_no_default_server(server):
    answer = server.client.get("/stopService?mode=Force")
    assert (answer.status_code, "use POST" in answer.json()["error"]) == (405, True)
    assert not server.health.is_draining


@pytest.mark.parametrize("how", ["managementPort", "apiKeyFile", "stopServiceByGet"])
def test_a_get_stops_where_pages_do_not_reach_or_it_is_wanted(tmp_path, how):
    key, port = new_key(), free_port()
    (tmp_path / "keys").write_text(hash_key(key))
    value = {"managementPort": port, "apiKeyFile": "keys", "stopServiceByGet": True}[how]
    with serving([*DAEMON, "--config", str(install(tmp_path, **{how: value}))]) as daemon:
        url = f"http://127.0.0.1:{port}" if how == "managementPort" else daemon.url
        stop = url + "/stopService"
        assert httpx.get(stop, headers={"Sec-Fetch-Site": "cross-site", "X-Api-Key": key}).status_code == 403
        assert httpx.get(stop, headers={"X-Api-Key": key}).status_code == 200
        assert daemon.process.wait(timeout=120) == 0


def test_names_are_configured_in_the_file_or_as_an_option(tmp_path):
    with serving([*DAEMON, "--config", str(install(tmp_path, allowedHosts=["chat.example"]))]) as daemon:
        assert httpx.get(daemon.url + "/v1/models", headers={"Host": "chat.example"}).status_code == 200
        assert httpx.get(daemon.url + "/v1/models", headers={"Host": "other.example"}).status_code == 421
        assert generate(daemon.url, "llama_65b")["id"] == "r1"
    with serve("--backend", "fake", "--allowed-host", "a.example", "--allowed-host", "*.b.example") as running:
        for host, status in {"a.example": 200, "x.b.example:80": 200, "b.example": 421}.items():
            assert httpx.get(running.url + "/v1/models", headers={"Host": host}).status_code == status


def test_a_server_beyond_loopback_has_the_names_of_its_machine(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "Box.lan")
    assert policy_of(ServerConfig((), host="127.0.0.1")).hosts == frozenset()
    assert policy_of(ServerConfig((), host="0.0.0.0")).hosts == {"box.lan", "box", "box.local"}
    assert policy_of(ServerConfig((), management=("10.0.0.1", 1))).hosts == {"box.lan", "box", "box.local"}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"allowed_hosts": ["http://a"]}, "allowedHosts: must be a host name, as a.example"),
        ({"cors_origins": ["a.example"]}, "corsOrigins: must be an origin, as https://a.example"),
    ],
)
def test_a_wrong_name_is_said(setting, words):
    with pytest.raises(BadRequest, match=words):
        Settings({**setting, "models": [{"backend": "fake"}]}).build()


def test_a_page_that_cors_names_may_ask_and_needs_its_key_for_the_question_only():
    key = new_key()
    policy = Policy(origins=checked_origins(["https://a.example"]), has_keys=True)
    page = {"Origin": "https://a.example", "Sec-Fetch-Site": "cross-site"}
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    with fake_server(keys=[key], policy=policy) as server:
        preflight = server.client.options("/v1/completions", headers={**page, **wanted})
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, page["Origin"])
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
        refused = server.post("/v1/completions", body, headers=page)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, page["Origin"])
        answer = server.post("/v1/completions", body, headers={**page, "Authorization": f"Bearer {key}"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, page["Origin"])
        other = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
        preflight = server.client.options("/v1/completions", headers={**other, **wanted})
        assert (preflight.status_code, preflight.headers.get("access-control-allow-origin")) == (403, None)


def test_with_keys_the_name_does_not_matter_to_who_shows_one():
    key = new_key()
    policy = Policy(checked_hosts([]), has_keys=True)
    with fake_server(keys=[key], policy=policy) as server:
        assert server.client.get("/v1/models", headers={"Host": "svc", "X-Api-Key": key}).status_code == 200
        assert server.client.get("/v1/models", headers={"Host": "svc", "X-Api-Key": key + "x"}).status_code == 401
        assert server.client.get("/v1/models", headers={"Host": "svc"}).status_code == 421


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["-d", '{"inputs": "hi"}'], 415),
        (["-H", "Content-Type: application/json", "-d", '{"inputs": "hi"}'], 200),
        (["--json", '{"inputs": "hi"}'], 200),
        (["-H", "Content-Type: application/octet-stream", "--data-binary", '{"inputs": "hi"}'], 200),
        (["-H", "Content-Type:", "-d", '{"inputs": "hi"}'], 200),
        (["-F", "inputs=hi"], 415),
    ],
)
def test_curl(server, arguments, status):
    command = ["curl", "-s", "-w", "\n%{http_code}", f"{server.url}/generate", *arguments]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    body, _, code = out.rpartition("\n")
    assert int(code) == status
    assert (status == 200) or "send it with Content-Type: application/json" in body


def test_ollamas_curl_lines_work_as_they_are_documented(server):
    body = json.dumps({"model": MODEL, "prompt": "hi", "stream": False})
    command = ["curl", "-s", f"{server.url}/api/generate", "-d", body]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert json.loads(out)["done"] is True
