"""/classify over HTTP, and /rerank and /score with a classification head."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from kvloom.contract.config import EngineConfig
from kvloom.contract.messages import NewSeq
from kvloom.contract.pooling import scores
from kvloom.rank.fake import FakeRunner, fake_embedding
from kvloom.server.serving import prompts
from tests.support.servers import MODEL, FakeServer, fake_server

TEXTS = ["hello", "a longer text, of several blocks", "hello"]


@contextmanager
def classifier(num_labels: int, activation: str) -> Iterator[FakeServer]:
    """A mock model whose pooled numbers are the scores of its labels."""
    make = FakeRunner.__init__

    def make_labels(self: FakeRunner, config: EngineConfig) -> None:
        make(self, config)
        self.info.labels = [f"label {i}" for i in range(num_labels)]
        self.info.activation = activation
        self.info.lacks = {"generation": "its checkpoint has no head for text, it labels texts"}

    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeRunner, "__init__", make_labels)
            server = stack.enter_context(fake_server())
        yield server


@pytest.fixture(scope="module")
def labelling() -> Iterator[FakeServer]:
    with classifier(8, "softmax") as server:
        yield server


@pytest.fixture(scope="module")
def judging() -> Iterator[FakeServer]:
    with classifier(1, "sigmoid") as server:
        yield server


def numbers(text: str) -> list[float]:
    return fake_embedding(list(text.encode()), "last")


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_each_text_has_its_label_and_a_number_for_each(labelling: FakeServer, path: str):
    answer = labelling.post(path, {"model": MODEL, "input": TEXTS}).json()
    assert {key: answer[key] for key in ("object", "model")} == {"object": "list", "model": MODEL}
    assert answer["usage"] == {"prompt_tokens": 42, "total_tokens": 42}
    for index, (text, entry) in enumerate(zip(TEXTS, answer["data"], strict=True)):
        probs = scores(numbers(text), "softmax")
        label = f"label {probs.index(max(probs))}"
        assert entry == {"index": index, "label": label, "probs": pytest.approx(probs), "num_classes": 8}


def test_the_heads_own_numbers_are_there_for_the_asking(labelling: FakeServer):
    answer = labelling.post("/classify", {"model": MODEL, "input": "hello", "use_activation": False}).json()
    assert answer["data"][0]["probs"] == numbers("hello")


def test_a_head_of_one_label_scores_pairs(judging: FakeServer):
    [wanted] = scores(numbers("a querya document")[:1], "sigmoid")
    pair = {"model": MODEL, "text_1": "a query", "text_2": "a document"}
    assert judging.post("/score", pair).json()["data"][0]["score"] == pytest.approx(wanted)
    reranked = {"model": MODEL, "query": "a query", "documents": ["another", "a document"]}
    results = judging.post("/rerank", reranked).json()["results"]
    assert {result["index"]: result["relevance_score"] for result in results}[1] == pytest.approx(wanted)


def test_the_tokens_of_all_pairs_are_bounded_together(judging: FakeServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompts, "MAX_REQUEST_TOKENS", 0)  # as many as fit into the context
    asked = {"model": MODEL, "query": "x" * 500}
    assert judging.post("/rerank", {**asked, "documents": ["y" * 500] * 2}).is_success
    response = judging.post("/rerank", {**asked, "documents": ["y" * 500] * 3})
    assert response.status_code == 400
    assert "has more than 2048 tokens in all its prompts" in response.text


def test_the_model_is_told_where_the_second_text_begins(judging: FakeServer, monkeypatch: pytest.MonkeyPatch):
    learn, told = FakeRunner._learn, []

    def listen(self: FakeRunner, new: NewSeq) -> None:
        told.append(new.second)
        learn(self, new)

    monkeypatch.setattr(FakeRunner, "_learn", listen)
    judging.post("/score", {"model": MODEL, "text_1": ["a query", "another"], "text_2": ["a document", "b"]})
    judging.post("/rerank", {"model": MODEL, "query": "query", "documents": ["a document"]})
    assert told == [len("a query"), len("another"), len("query")]


def test_the_cards_say_what_it_does(labelling: FakeServer):
    assert labelling.client.get(f"/v1/models/{MODEL}").json()["task"] == "text-classification"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", {"prompt": "a"}, "its checkpoint has no head for text, it labels texts"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}]},
            "messages: the engine of this model",
        ),
        ("/v1/embeddings", {"input": "a"}, "model: is a classifier and makes no embeddings; ask /classify"),
        ("/rerank", {"query": "a", "documents": ["b"]}, "model: scores by one label; this one has 8: ask /classify"),
        ("/classify", {"input": ""}, "input: must not be empty"),
        ("/classify", {"input": ["a"] * 2049}, "input: asks for more than 2048 answers in one request"),
        ("/classify", {"input": "a" * 2049}, "your input resulted in at least 2049 tokens"),
        ("/classify", {"input": [999]}, "input: token id 999 is outside the vocabulary of 258"),
        ("/classify", {"input": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens: is not supported"),
    ],
)
def test_what_it_does_not_do_is_a_400_in_one_line(labelling: FakeServer, path: str, body: dict[str, Any], message: str):
    response = labelling.post(path, {"model": MODEL, **body})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert "\n" not in response.json()["error"]["message"]


def test_a_model_that_makes_embeddings_cannot_be_asked_to_judge():
    with classifier(0, "") as server:
        response = server.post("/rerank", {"model": MODEL, "query": "a", "documents": ["b"]})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("model: the engine of this model cannot do it")


def test_an_instruction_is_for_models_that_are_asked(judging: FakeServer):
    response = judging.post("/score", {"model": MODEL, "text_1": "a", "text_2": "b", "instruction": "c"})
    assert response.json()["error"]["param"] == "instruction"


def test_a_model_that_writes_has_no_labels(server: FakeServer):
    response = server.post("/classify", {"model": MODEL, "input": "a"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
