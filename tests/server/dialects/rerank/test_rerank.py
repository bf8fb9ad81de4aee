"""/rerank and /score over HTTP: order, formats of the answer, limits; a score compares the model's "yes" with its
"no".
"""

import math
from typing import Any

import numpy as np
import pytest

from kvloom.contract.errors import BadRequest
from kvloom.contract.request import Request, TokenLogprob, check_request
from kvloom.contract.sampling import SamplingParams
from kvloom.rank.fake import ByteTokenizer
from kvloom.rank.sampler import describe, log_softmax
from kvloom.server.dialects.rerank.judging import score
from kvloom.server.serving import prompts
from kvloom.server.serving.generation import Answer
from tests.support.servers import MODEL, FakeServer, fake_server

DOCUMENTS = ["a car", "an animal", "a dog", "a car"]


def rerank(server: FakeServer, path: str = "/v1/rerank", **fields: Any) -> Any:
    response = server.post(path, {"model": MODEL, "query": "what is a cat?", "documents": DOCUMENTS, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_every_document_is_judged_and_the_best_come_first(server: FakeServer):
    answer = rerank(server)
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert sorted(result["index"] for result in answer["results"]) == [0, 1, 2, 3]
    assert all(result["document"] == {"text": DOCUMENTS[result["index"]]} for result in answer["results"])
    of = {result["index"]: result["relevance_score"] for result in answer["results"]}
    assert of[0] == of[3]
    assert len(set(of.values())) > 1


def test_a_document_has_the_same_score_alone_among_others_and_from_score(server: FakeServer):
    among = {result["index"]: result["relevance_score"] for result in rerank(server)["results"]}
    pairs = {"model": MODEL, "text_1": "what is a cat?", "text_2": DOCUMENTS}
    scores = server.post("/v1/score", pairs).json()["data"]
    for index, document in enumerate(DOCUMENTS):
        [alone] = rerank(server, documents=[document])["results"]
        assert alone["relevance_score"] == among[index] == scores[index]["score"]


@pytest.mark.parametrize(
    ("path", "given", "is_told"),
    [
        ("/v1/rerank", {}, True),
        ("/rerank", {}, True),
        ("/v2/rerank", {}, False),
        ("/v2/rerank", {"return_documents": True}, True),
        ("/v1/rerank", {"return_documents": False}, False),
    ],
)
def test_documents_are_told_as_the_route_has_it_or_as_asked(server: FakeServer, path: str, given: Any, is_told: bool):
    assert all(("document" in result) is is_told for result in rerank(server, path, **given)["results"])


@pytest.mark.parametrize(("top_n", "count"), [(1, 1), (3, 3), (9, 4), (0, 4), (None, 4)])
def test_top_n_is_how_many_results_come(server: FakeServer, top_n: int | None, count: int):
    assert rerank(server, top_n=top_n)["results"] == rerank(server)["results"][:count]


def test_the_instruction_is_part_of_what_is_judged(server: FakeServer):
    usual, other = rerank(server), rerank(server, instruction="Find what moves.")
    assert usual["usage"]["prompt_tokens"] != other["usage"]["prompt_tokens"]


def test_scores_of_pairs_go_pair_by_pair(server: FakeServer):
    def scores(first: Any, second: Any) -> list[float]:
        answer = server.post("/score", {"model": MODEL, "text_1": first, "text_2": second}).json()
        assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
        return [entry["score"] for entry in answer["data"]]

    assert scores(["a", "b"], ["c", "d"]) == scores("a", "c") + scores("b", "d")
    assert scores(["a"], ["c", "d"]) == scores("a", "c") + scores("a", "d")


def test_special_tokens_in_a_document_are_text(server: FakeServer):
    plain, special = (rerank(server, documents=[text]) for text in ("x" * 7, "<|end|>"))
    assert special["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "fields", "problem"),
    [
        ("/v1/rerank", {"documents": ["x"] * 1001}, "documents: asks for more than 1000 answers in one request"),
        ("/v1/rerank", {"documents": ["x" * 5000]}, "your documents resulted in at least 5280 tokens"),
        ("/v1/rerank", {"documents": [{"text": "x", "title": "y"}]}, "`title`"),
        ("/v1/rerank", {"documents": []}, "documents"),
        ("/v1/rerank", {"top_n": -1}, "top_n"),
        ("/v2/rerank", {"max_tokens_per_doc": 9}, "max_tokens_per_doc: is not supported; documents are judged whole"),
        ("/v1/rerank", {"rank_fields": ["a"]}, "rank_fields: is not supported; give each document as one text"),
        (
            "/score",
            {"truncate_prompt_tokens": 9},
            "truncate_prompt_tokens: is not supported; documents are judged whole",
        ),
        ("/score", {"text_1": ["a", "b", "c"]}, "text_1: must be one text or as many as text_2 has, 1; got 3"),
        ("/score", {"text_2": []}, "text_2"),
    ],
)
def test_what_cannot_be_judged_is_refused_by_name(server: FakeServer, path: str, fields: Any, problem: str):
    given = {"query": "q", "documents": ["d"]} if "rerank" in path else {"text_1": "a", "text_2": "b"}
    response = server.post(path, {"model": MODEL, **given, **fields})
    assert response.status_code == 400
    assert problem in response.json()["error"]["message"]


def test_the_tokens_of_all_judgements_are_bounded_together(server: FakeServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompts, "MAX_REQUEST_TOKENS", 0)  # as many as fit into the context
    assert len(rerank(server, documents=["a" * 400] * 2)["results"]) == 2
    response = server.post("/rerank", {"model": MODEL, "query": "what is a cat?", "documents": ["a" * 400] * 4})
    assert response.status_code == 400
    assert "documents: has more than 2048 tokens in all its prompts" in response.text


def test_a_model_without_a_chat_template_is_refused():
    class Bare(ByteTokenizer):
        def apply_chat_template(self, *messages: Any, **values: Any) -> str:
            raise BadRequest("messages", "this model has no chat template")

    with fake_server(tokenizer=Bare()) as server:
        response = server.post("/v1/rerank", {"model": MODEL, "query": "q", "documents": ["d"]})
    assert response.json()["error"]["message"] == ("model: cannot be asked: messages: this model has no chat template")


def test_the_log_probabilities_of_named_tokens_are_told_behind_the_likeliest():
    logprobs = log_softmax(np.array([0.0, 3.0, 1.0, 2.0], np.float32))
    told = describe(logprobs, 1, 1, (2, 0))
    assert [token for token, _ in told.top] == [1, 2, 0]
    assert [value for _, value in told.top] == pytest.approx([logprobs[1], logprobs[2], logprobs[0]])


@pytest.mark.parametrize(("yes", "no"), [(-0.5, -2.0), (-9.0, -1.0), (-1.0, -900.0), (-900.0, -1.0), (-3.0, -3.0)])
def test_a_score_is_the_share_of_yes_in_yes_and_no(yes: float, no: float):
    answer = Answer((1,), logprobs=[TokenLogprob(7, -0.1, ((5, -0.1), (8, yes), (9, no)))])
    assert score(answer) == pytest.approx(1 / (1 + math.exp(min(no - yes, 700))))
    assert 0 <= score(answer) <= 1


def test_tokens_outside_the_vocabulary_cannot_be_named():
    request = Request("r", (1,), SamplingParams(max_tokens=1, logprobs=0, logprob_ids=(300,)))
    with pytest.raises(BadRequest, match="logprob_ids: token id 300 is outside the vocabulary of 256"):
        check_request(request, 64, 256)


def test_coheres_route_tells_its_meta(server: FakeServer):
    body = {"query": "a", "documents": ["b", "c"]}
    told = server.post("/v2/rerank", body).json()
    assert told["meta"] == {
        "api_version": {"version": "2"},
        "tokens": {"input_tokens": told["usage"]["prompt_tokens"], "output_tokens": 0},
    }
    assert "meta" not in server.post("/v1/rerank", body).json()
