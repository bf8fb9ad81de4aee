"""/v1/embeddings over HTTP: inputs, encodings of the answer, limits, and running beside requests that generate."""

import base64
import threading
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvloom.contract.config import EngineConfig
from kvloom.contract.pooling import unit
from kvloom.engine.driver import Driver
from kvloom.engine.inbox import Message
from kvloom.rank.fake import FakeRunner, fake_embedding
from tests.support.servers import MODEL, FakeServer, fake_server
from tests.support.waiting import until
from tests.wire.gate import Gate

TEXTS = ["hello", "a longer text, of several blocks", "hello"]


def truth(text: str, pooling: str = "last", dimensions: int | None = None) -> list[float]:
    return list(unit(array("f", fake_embedding(list(text.encode()), pooling)).tobytes(), dimensions))


def embed(server: FakeServer, input: Any, **fields: Any) -> Any:
    response = server.post("/v1/embeddings", {"model": MODEL, "input": input, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def pooling_server(monkeypatch: pytest.MonkeyPatch, pooling: str, lacks: dict[str, str] | None = None) -> Any:
    make = FakeRunner.__init__

    def make_pooling(self: FakeRunner, config: EngineConfig) -> None:
        make(self, config)
        self.info.pooling, self.info.lacks = pooling, lacks or {}

    monkeypatch.setattr(FakeRunner, "__init__", make_pooling)
    return fake_server()


def test_an_answer_has_every_key_that_openai_documents(server: FakeServer):
    assert embed(server, "hello") == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": pytest.approx(truth("hello"))}],
        "model": MODEL,
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        (TEXTS, TEXTS),
        (list(b"hello"), ["hello"]),
        ([list(text.encode()) for text in TEXTS], TEXTS),
        ([str(i) for i in range(2048)], [str(i) for i in range(2048)]),
    ],
    ids=["texts", "tokens", "lists of tokens", "very many"],
)
def test_inputs_are_answered_in_their_order(server: FakeServer, given: Any, texts: list[str]):
    answer = embed(server, given)
    assert [entry["index"] for entry in answer["data"]] == list(range(len(texts)))
    assert [entry["embedding"] for entry in answer["data"]] == [truth(text) for text in texts]
    assert answer["usage"]["total_tokens"] == sum(map(len, texts))


def test_base64_holds_the_same_numbers(server: FakeServer):
    [entry] = embed(server, "hello", encoding_format="base64")["data"]
    assert array("f", base64.b64decode(entry["embedding"])).tolist() == truth("hello")


def test_fewer_dimensions_are_of_length_1_again(server: FakeServer):
    [entry] = embed(server, "hello", dimensions=3)["data"]
    assert entry["embedding"] == truth("hello", dimensions=3)
    assert sum(value * value for value in entry["embedding"]) == pytest.approx(1)


@pytest.mark.parametrize(("most", "text"), [(3, "hel"), (5, "hello"), (9, "hello"), (-1, "hello")])
@pytest.mark.parametrize("given", ["hello", list(b"hello")])
def test_an_input_may_be_cut(server: FakeServer, given: Any, most: int, text: str):
    [entry] = embed(server, given, truncate_prompt_tokens=most)["data"]
    assert entry["embedding"] == truth(text)


def test_minus_one_cuts_what_is_longer_than_the_model_reads(server: FakeServer):
    assert embed(server, "a" * 3000, truncate_prompt_tokens=-1)["usage"]["total_tokens"] == 2048


def test_the_mean_where_the_model_says_so(monkeypatch: pytest.MonkeyPatch):
    with pooling_server(monkeypatch, "mean") as server:
        for _ in range(2):  # the second time its blocks are in the prefix cache
            assert [entry["embedding"] for entry in embed(server, TEXTS)["data"]] == [truth(t, "mean") for t in TEXTS]


def test_a_model_that_pools_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pooling_server(monkeypatch, "max_tokens") as server:
        response = server.post("/v1/embeddings", {"input": "a"})
        assert response.status_code == 400
        assert response.json()["error"]["message"] == (
            "model: makes its embeddings by max_tokens; this server has last, mean, cls"
        )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [-1]}, "input[0]"),
        ({"input": [5, 258]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a" * 2049}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 9}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        *(({"input": "a", "truncate_prompt_tokens": most}, "truncate_prompt_tokens") for most in (-2, 0, 2049)),
    ],
)
def test_bad_input_is_named(server: FakeServer, fields: dict[str, Any], param: str):
    response = server.post("/v1/embeddings", fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


def test_texts_of_a_request_share_steps(gate: Gate, monkeypatch: pytest.MonkeyPatch):
    """While the step of another one waits, all of them arrive."""
    put, arrived = Driver.put, []

    def noted(driver: Driver, message: Message) -> None:
        put(driver, message)
        arrived.append(message)

    monkeypatch.setattr(Driver, "put", noted)
    with fake_server() as server, ThreadPoolExecutor() as others:
        first = others.submit(embed, server, "x")
        until(lambda: gate.is_waited_at)
        texts = others.submit(embed, server, TEXTS)
        until(lambda: len(arrived) == 1 + len(TEXTS))
        gate.open()
        first.result()
        texts.result()
    assert max(gate.sizes) == len(TEXTS)


def test_a_client_that_leaves_takes_its_request_along(gate: Gate):
    with fake_server() as server:
        server.leave("/v1/embeddings", {"input": ["x" * 900] * 8}, lambda: gate.is_waited_at)
        gate.open()
        until(lambda: server.engine.stats().num_running + server.engine.stats().num_waiting == 0)
        until(lambda: server.admission.num_active == 0)
        until(lambda: server.engine.stats().num_free_blocks == server.engine.stats().num_blocks)


def test_prompt_tokens_count_against_the_bound(gate: Gate):
    with fake_server(max_queued_tokens=50) as server:
        first = threading.Thread(target=lambda: embed(server, ["x" * 20] * 2))
        first.start()
        until(lambda: gate.is_waited_at)
        refused = server.post("/v1/embeddings", {"input": "y" * 20})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        gate.open()
        first.join()
        assert embed(server, "y" * 20)["usage"]["total_tokens"] == 20


PROMPTS = {"query": "Instruct: find it.\nQuery: ", "document": ""}


def test_a_prompt_of_the_model_goes_before_each_text():
    with fake_server(card={"prompts": PROMPTS}) as server:
        [first, second] = embed(server, ["hello", "there"], prompt_name="query")["data"]
        assert first["embedding"] == truth(PROMPTS["query"] + "hello")
        assert second["embedding"] == truth(PROMPTS["query"] + "there")
        assert embed(server, "hello", prompt_name="document")["data"] == embed(server, "hello")["data"]


@pytest.mark.parametrize(("form", "shown"), [("flat", "hello"), ("structured", [{"type": "text", "text": "hello"}])])
def test_a_text_is_a_message_of_the_template_where_the_model_says_so(form: str, shown: Any):
    """As sentence-transformers 6 has it for tokenizers with a template; a prompt of the model is a system message."""
    with fake_server(card={"prompts": PROMPTS, "message_form": form}) as server:
        user = f"user: {shown}\n"
        system = PROMPTS["query"] if form == "flat" else [{"type": "text", "text": PROMPTS["query"]}]
        assert embed(server, ["hello"])["data"][0]["embedding"] == truth(user)
        assert embed(server, "hello", prompt_name="document")["data"][0]["embedding"] == truth(user)
        assert embed(server, "hello", prompt_name="query")["data"][0]["embedding"] == truth(f"system: {system}\n{user}")
        assert embed(server, list(user.encode()))["data"][0]["embedding"] == truth(user)
        for path, body in (("/api/embed", {"input": "hello"}), ("/api/embeddings", {"prompt": "hello"})):
            found = server.post(path, {"model": MODEL, **body}).json()
            vector = found["embeddings"][0] if "embeddings" in found else found["embedding"]
            assert list(unit(array("f", vector).tobytes())) == pytest.approx(truth(user)), path


@pytest.mark.parametrize(
    ("given", "name", "problem"),
    [
        ("hello", "title", "prompt_name: 'title' is no prompt of this model; it has query, document"),
        ([1, 2], "query", "prompt_name: goes before texts; the input is in tokens"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_refused_by_name(given: Any, name: str, problem: str):
    with fake_server(card={"prompts": PROMPTS}) as server:
        response = server.post("/v1/embeddings", {"model": MODEL, "input": given, "prompt_name": name})
        assert (response.status_code, response.json()["error"]["message"]) == (400, problem)


@pytest.mark.parametrize("path", ["/health/timed-10", "/health_generate"])
def test_the_health_of_a_model_that_generates_nothing_is_shown_by_an_embedding(path, monkeypatch):
    with pooling_server(monkeypatch, "mean", {"generation": "it has no head"}) as server:
        assert server.complete().status_code == 400
        assert server.client.get(path).status_code == 200
