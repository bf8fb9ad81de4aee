"""kvloom over vLLM itself: its values are those of `transformers`, and seeds have effect."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvloom.rank.byte_tokenizer import EOS_ID
from tests.server.dialects.decisions.test_odds import asked_with, choice, numbers
from tests.support.lazily import lazily
from tests.support.servers import MODEL, OVER_VLLM, FakeServer
from tests.support.vllm.hosts import chained_model

transformers = lazily("transformers")

if not OVER_VLLM:
    pytest.skip("needs vLLM itself: make compat-vllm", allow_module_level=True)

pytestmark = [pytest.mark.compat, pytest.mark.timeout(900)]
PROMPT = list(b"The quick brown fox")
WAIT_S = 180.0
Logits = Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="module")
def model() -> transformers.LlamaForCausalLM:
    return transformers.AutoModelForCausalLM.from_pretrained(chained_model(), dtype=torch.float32)


@pytest.fixture(scope="module")
def logits(model: transformers.LlamaForCausalLM) -> Logits:
    """Computes the logits at every position of the given tokens."""

    def compute(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0]

    return compute


def complete(server: FakeServer, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields}
    answer = server.post("/v1/completions", {"return_token_ids": True, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def together(*asks: Callable[[], None]) -> None:
    threads = [threading.Thread(target=ask) for ask in asks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)


def test_log_probabilities_are_those_of_transformers(server: FakeServer, logits: Logits):
    choice = complete(server, logprobs=3, prompt_logprobs=2)
    ids = choice["token_ids"]
    expected = logits([*PROMPT, *ids]).log_softmax(-1)
    for number, (value, top) in enumerate(
        zip(choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"], strict=True)
    ):
        at = expected[len(PROMPT) - 1 + number]
        assert value == pytest.approx(float(at[ids[number]]), abs=1e-3)
        assert sorted(top.values(), reverse=True) == pytest.approx(at.topk(3).values.tolist(), abs=1e-3)
    for number, told in enumerate(choice["prompt_logprobs"][1:]):
        assert told[str(PROMPT[number + 1])]["logprob"] == pytest.approx(
            float(expected[number][PROMPT[number + 1]]), abs=1e-3
        )


def test_penalties_and_bias_choose_as_their_formulas_do(server: FakeServer, logits: Logits):
    bias = {ord("a"): 1.5, ord("Q"): 2.2}
    for fields in (
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"repetition_penalty": 1.8},
        {"logit_bias": {str(id): value for id, value in bias.items()}},
    ):
        ids = list(PROMPT)
        for _ in range(30):
            found = logits(ids)[-1]
            said, seen = ids[len(PROMPT) :], torch.tensor(sorted(set(ids)))
            for id in set(said):
                found[id] -= fields.get("frequency_penalty", 0) * said.count(id) + fields.get("presence_penalty", 0)
            rate = fields.get("repetition_penalty", 1)
            found[seen] = torch.where(found[seen] > 0, found[seen] / rate, found[seen] * rate)
            for id, value in bias.items() if "logit_bias" in fields else ():
                found[id] += value
            ids.append(int(found.argmax()))
        assert complete(server, max_tokens=30, **fields)["token_ids"] == ids[len(PROMPT) :]


def test_decisions_are_the_odds_of_every_answer(server: FakeServer, logits: Logits, monkeypatch: pytest.MonkeyPatch):
    labels = ["a", "ab", "0b", "yes"]
    questions = [choice(labels), {"type": "predicate", "instructions": "Is it so?"}]
    answer, requests = asked_with(server, monkeypatch, {"input": "x" * 70, "questions": questions})
    odds = []
    for request in requests:
        first, ids = request.params.scored_from, [*request.prompt_ids, EOS_ID]
        rows = logits(list(request.prompt_ids))[first - 1 :].log_softmax(-1)
        odds.append(math.exp(sum(float(row[id]) for row, id in zip(rows, ids[first:], strict=True))))
    several, both = odds[: len(labels)], odds[len(labels) :]
    expected = [*(one / sum(several) for one in several), both[0] / sum(both)]
    assert numbers(answer["answers"]) == pytest.approx(expected, rel=1e-3)


def test_a_seed_gives_its_answer_alone_and_in_company(server: FakeServer):
    sampled = {"temperature": 1.0, "max_tokens": 40}
    alone = [complete(server, seed=seed, **sampled)["text"] for seed in range(4)]
    assert len(set(alone)) == 4
    body = {"model": MODEL, "prompt": [PROMPT] * 4, "ignore_eos": True, "seed": 0, "n": 2, **sampled}
    many = [choice["text"] for choice in server.post("/v1/completions", body).json()["choices"]]
    assert many == [choice["text"] for choice in server.post("/v1/completions", body).json()["choices"]]
    assert many[0] == alone[0]
    assert len(set(many)) > 1


def test_stop_tokens_end_an_answer_and_a_minimum_holds_them_back(server: FakeServer):
    ids = complete(server)["token_ids"]
    assert complete(server, stop_token_ids=[ids[4]])["token_ids"][:4] == ids[:4]
    stopped = complete(server, stop_token_ids=[ids[4]])
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", ids[4])
    held = complete(server, stop_token_ids=[ids[4]], min_tokens=8)["token_ids"]
    assert held[:4] == ids[:4]
    assert len(held) >= 8
    assert ids[4] not in held[:7]


def test_scores_are_right_beside_requests_with_log_probabilities(server: FakeServer):
    """Scores are log-probabilities of given tokens; in one step vLLM would mix these with those of other requests."""
    body = {"model": MODEL, "text_1": "what is a cat?", "text_2": ["an animal", "a car"]}
    alone = server.post("/v1/score", body).json()["data"]
    expected = complete(server, logprobs=2, max_tokens=60)["logprobs"]
    found: list[Any] = []

    def score() -> None:
        found.append(server.post("/v1/score", body).json()["data"])

    def tell() -> None:
        found.append(complete(server, logprobs=2, max_tokens=60)["logprobs"])

    together(score, tell, tell, tell, score)
    scores = [each for each in found if isinstance(each, list)]
    assert len(found) == 5
    assert len(scores) == 2
    for each in scores:
        assert [one["score"] for one in each] == pytest.approx([one["score"] for one in alone], abs=1e-3)
    for each in found:
        if isinstance(each, dict):
            assert each["tokens"] == expected["tokens"]
            assert each["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=1e-3)
            assert all(math.isfinite(value) for top in each["top_logprobs"] for value in top.values())
