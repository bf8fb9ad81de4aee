"""A server that is still loading its model: it listens, answers each dialect with a proper error, and can be
stopped.
"""

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import pytest

from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import ModelError
from kvloom.contract.messages import RankInfo
from kvloom.engine.engine import Engine
from kvloom.engine.link.executor import InProcessExecutor
from kvloom.engine.thread import EngineThread
from kvloom.net.listening import listen
from kvloom.rank.fake import ByteTokenizer, FakeRunner
from kvloom.server.config.settings import ServerConfig
from kvloom.server.errors import family_of, status_of
from kvloom.server.run import compose, loading
from kvloom.server.run.loading import Loaded
from kvloom.server.secure.api_keys import hash_key, new_key
from kvloom.server.serving.card import ModelCard
from tests.support.ports import free_port
from tests.support.waiting import until

TEXT = "the model is being loaded; try again soon"
OPENAI = {"error": {"message": TEXT, "type": "server_error", "param": None, "code": None}}
ANTHROPIC = {"type": "error", "error": {"type": "overloaded_error", "message": TEXT}}
OLLAMA = {"error": TEXT}
TGI = {"error": TEXT, "error_type": "unavailable"}
HEALTH = {"error": TEXT, "error_type": "healthcheck"}
CARD = ModelCard("mock", EngineConfig(backend="fake", num_blocks=64))


@dataclass
class Held:
    """Stands for Loading: its models become ready when the test says so."""

    opened: list[EngineThread] = field(default_factory=list)
    models: "Future[Loaded]" = field(default_factory=Future)

    def finish(self) -> None:
        executor = InProcessExecutor(FakeRunner(CARD.engine))
        tokenizer = ByteTokenizer()
        self.opened.append(EngineThread(Engine(CARD.engine, executor, tokenizer), executor))
        self.models.set_result(Loaded([(CARD, self.opened[0], tokenizer)]))


@contextmanager
def loading_server(**config: object) -> Iterator[tuple[httpx.Client, Held, list[BaseException]]]:
    """A real server in a thread; the list contains the error that ended it, if any."""
    held, ended = Held(), []
    settings = ServerConfig((CARD,), **config)

    def run() -> None:
        try:
            compose.run(settings, held, [listener])
        except BaseException as error:
            ended.append(error)

    with listen("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        with httpx.Client(base_url=url, timeout=120) as client:
            try:
                yield client, held, ended
            finally:
                with contextlib.suppress(httpx.TransportError):  # it may have stopped already
                    client.post("/stopService")
                thread.join(120)
                for engine in held.opened:
                    engine.close()
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/chat/completions", OPENAI),
        ("POST", "/chat/completions", OPENAI),
        ("POST", "/v1/completions", OPENAI),
        ("POST", "/v1/embeddings", OPENAI),
        ("POST", "/v1/responses", OPENAI),
        ("POST", "/v1/conversations", OPENAI),
        ("GET", "/v1/models", OPENAI),
        ("POST", "/tokenize", OPENAI),
        ("GET", "/is_sleeping", OPENAI),
        ("GET", "/load", OPENAI),
        ("POST", "/v1/messages", ANTHROPIC),
        ("POST", "/api/chat", OLLAMA),
        ("GET", "/api/tags", OLLAMA),
        ("POST", "/generate", TGI),
        ("POST", "/generate_stream", TGI),
        ("GET", "/info", TGI),
        ("GET", "/metrics", TGI),
        ("GET", "/console/feed", TGI),
        ("POST", "/v2/models/mock/infer", TGI),
        ("GET", "/v2/models/mock/ready", TGI),
        ("GET", "/v2/health/ready", TGI),
        ("POST", "/infer", TGI),
        ("GET", "/health", HEALTH),
        ("GET", "/healthz", HEALTH),
        ("GET", "/readyz", HEALTH),
        ("GET", "/health/timed-10", HEALTH),
        ("GET", "/ping", HEALTH),
        ("POST", "/ping", HEALTH),
        ("GET", "/", HEALTH),
        ("GET", "/v1/config", HEALTH),
    ],
)
def test_every_route_says_so_in_its_own_words_with_a_time_to_come_back(method, path, body):
    with loading_server() as (client, _, _):
        answer = client.request(method, path, content=b"{}" if method == "POST" else None)
        assert (answer.status_code, answer.json()) == (529 if body is ANTHROPIC else 503, body)
        assert int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize("path", ["/livez", "/v2/health/live", "/docs", "/openapi.json", "/console", "/version"])
def test_what_needs_no_model_answers(path):
    with loading_server() as (client, _, _):
        assert client.get(path).status_code == 200


def test_no_route_is_served_before_there_is_a_model():
    """All routes of the server's own description, so that new ones are tested too."""
    early = {"/livez", "/v2/health/live", "/docs", "/openapi.json", "/console", "/console/{name}", "/version"}
    with loading_server() as (client, _, _):
        paths = client.get("/openapi.json").json()["paths"]
        for path, methods in paths.items():
            for method in methods:
                if path not in early and path != "/stopService":
                    answer = client.request(method, path.replace("{", "").replace("}", ""))
                    assert answer.status_code == status_of("unavailable", family_of(path)), (method, path)


def test_an_unknown_route_and_a_wrong_method_are_told_as_ever():
    with loading_server() as (client, _, _):
        assert client.get("/nowhere").status_code == 404
        assert client.put("/v1/models").status_code == 405


def test_a_key_is_asked_for_before_anything_is_told():
    key = new_key()
    with loading_server(api_key_hashes=(hash_key(key),)) as (client, _, _):
        assert client.get("/v1/models").status_code == 401
        assert client.get("/v1/models", headers={"x-api-key": key}).status_code == 503
        assert client.get("/livez").status_code == 200
        client.headers["x-api-key"] = key


def test_a_large_body_is_refused_unread():
    with loading_server() as (client, _, _):
        answer = client.post("/v1/completions", content=b"x" * (16 << 20))
        assert answer.status_code == 503


def test_it_answers_on_the_same_connection_when_the_model_is_there(capsys):
    with loading_server() as (client, held, _):
        assert client.get("/health").status_code == 503
        assert "Daemon start success!" not in capsys.readouterr().out
        held.finish()
        until(lambda: client.get("/health").status_code == 200)
        until(lambda: "Daemon start success!" in capsys.readouterr().out)
        answer = client.post("/v1/completions", json={"model": "mock", "prompt": "hi", "max_tokens": 3})
        assert answer.json()["usage"]["completion_tokens"] <= 3


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_reason(capsys):
    with loading_server() as (client, held, ended):
        assert client.get("/livez").status_code == 200
        held.models.set_exception(ModelError("the file is damaged"))
        until(lambda: ended)
    assert str(ended[0]) == "the file is damaged"
    assert "Daemon start success!" not in capsys.readouterr().out


def test_it_can_be_told_to_stop_while_it_loads():
    with loading_server() as (client, _, ended):
        assert client.post("/stopService").status_code == 200
    assert ended == []


def test_a_model_that_fails_when_nobody_waits_any_more_is_no_mistake_of_the_thread(monkeypatch):
    may_fail = threading.Event()

    def open_engine(*arguments: object) -> EngineThread:
        may_fail.wait()
        raise ModelError("its process was ended")

    monkeypatch.setattr(loading, "factory_of", lambda name: open_engine)
    found = loading.Loading(ServerConfig((CARD,)))
    assert not found.models.cancel()
    may_fail.set()
    assert str(found.models.exception(timeout=120)) == "its process was ended"


def test_models_share_the_memory_that_their_caches_will_take():
    """Caches get pages as they are used: what is free while a model is opened says little of those opened before."""
    auto, given = EngineConfig(backend="fake"), EngineConfig(backend="fake", kv_cache_bytes=300, host_cache_bytes=50)
    elsewhere = EngineConfig(backend="fake", device="cuda:0")
    info = RankInfo(10, 16, 100, 100, "fake", kv_bytes=1000, num_host_blocks=2)
    shared = loading.beside(auto, 7, [auto, given, elsewhere, auto])
    assert (shared.promised_bytes, shared.num_sharing) == (7 + 350, 3)
    shared = loading.beside(given, 7, [auto, given])
    assert (shared.promised_bytes, shared.num_sharing) == (7, 1), "what is given is given"
    assert (loading.promise_of(auto, info), loading.promise_of(elsewhere, info)) == (1200, 200)


LOADS_FOR_EVER = """
import sys, threading
from kvloom.server.run import loading
loading.factory_of = lambda name: lambda *arguments: threading.Event().wait()
from kvloom.cli import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_loads_ends_it_at_once_and_in_order(number):
    port = free_port()
    command = [sys.executable, "-c", LOADS_FOR_EVER, "serve", "--backend", "fake", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        until(lambda: is_alive(f"http://127.0.0.1:{port}"))
        server.send_signal(number)
        out, _ = server.communicate(timeout=120)
    assert (server.returncode, out) == (0, "loading mock ...\n")


def is_alive(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url + "/livez").status_code == 200
    return False
