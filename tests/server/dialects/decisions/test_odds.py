"""Numbers of answers are the model's own, compared with every answer of a tiny model, and with published ones."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import ServingError
from kvloom.contract.request import FinishReason, Request, TokenLogprob
from kvloom.rank.fake import EOS_ID, ByteTokenizer
from kvloom.rank.loading import open_runner
from kvloom.server.dialects.decisions.odds import (
    choice_confidence,
    level,
    logprob_of,
    probabilities,
    score_confidence,
)
from kvloom.server.serving.generation import Answer
from tests.support.models.checkpoints import save, tiny_model
from tests.support.servers import FakeServer, fake_server

LETTERS = "ab"
EVERY = ["".join(letters) for count in (1, 2, 3) for letters in itertools.product(LETTERS, repeat=count)]


class Tiny:
    """A random model served by the reference back end, and the same in transformers."""

    def __init__(self, server: FakeServer, model: Any) -> None:
        self.server, self._model = server, model

    def odds(self, prompt: tuple[int, ...], label: str) -> float:
        """Probability that the answer to `prompt` is `label` and then ends."""
        answer = [*label.encode(), EOS_ID]
        with torch.no_grad():
            logits = self._model(torch.tensor([[*prompt, *answer]])).logits[0].double().log_softmax(-1)
        rows = logits[len(prompt) - 1 :]
        return math.exp(sum(float(rows[i, token]) for i, token in enumerate(answer)))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    model = tiny_model("qwen3", vocab_size=258, max_position_embeddings=2048)
    path = str(save(model, tmp_path_factory.mktemp("tiny")))
    torch.set_num_threads(1)
    config = EngineConfig(model=path, backend="reference", num_blocks=400, max_seq_len=1024)
    with fake_server(make_runner=lambda shape: open_runner(config, [EOS_ID], lambda done, total: None)) as server:
        yield Tiny(server, model)


def asked_with(server: FakeServer, monkeypatch: pytest.MonkeyPatch, body: Any) -> tuple[Any, list[Request]]:
    """The answer to a body, and the requests that the engine got for it."""
    got: list[Request] = []
    open_feed = server.engine.open
    monkeypatch.setattr(server.engine, "open", lambda requests: (got.extend(requests), open_feed(requests))[1])
    answer = server.post("/v1/decisions", {"model": "mock", **body})
    assert answer.status_code == 200, answer.text
    return answer.json(), got


def numbers(answers: list[Any]) -> list[float]:
    """All probabilities of answers; the reference back end's sums are not those of another batch to the last bit."""
    told = (answer.get("probabilities", [answer]) for answer in answers)
    return [each["probability"] for of in told for each in of]


def choice(values: list[str]) -> dict[str, Any]:
    return {"type": "choice", "instructions": "Which?", "choices": [{"value": value} for value in values]}


@pytest.mark.parametrize("labels", [["a", "b"], ["a", "ab", "abb", "b"], ["bab", "aba", "abb"], EVERY], ids=len)
def test_a_choice_has_the_probabilities_of_all_answers_that_are_one_of_its_labels(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, labels: list[str]
):
    """Every text of up to three letters is enumerated."""
    answer, requests = asked_with(tiny.server, monkeypatch, {"input": "x" * 70, "questions": [choice(labels)]})
    prompts = {request.prompt_ids[: request.params.scored_from] for request in requests}
    [prompt] = prompts
    assert bytes(requests[0].prompt_ids[len(prompt) :]).decode() == labels[0]
    every = {text: tiny.odds(prompt, text) for text in EVERY}
    total = sum(every[label] for label in labels)
    told = {each["value"]: each["probability"] for each in answer["answers"][0]["probabilities"]}
    assert told == pytest.approx({label: every[label] / total for label in labels}, rel=1e-4)
    assert sum(told.values()) == pytest.approx(1)
    assert answer["answers"][0]["choice"] == max(labels, key=every.__getitem__)


def test_predicates_and_scores_are_choices_among_their_labels(tiny: Tiny, monkeypatch: pytest.MonkeyPatch):
    questions = [
        {"type": "predicate", "name": "p", "instructions": "Is it?"},
        {"type": "score", "instructions": "How much?", "levels": [{"label": "a"}, {"label": "ab"}, {"label": "b"}]},
    ]
    answer, requests = asked_with(tiny.server, monkeypatch, {"input": "x" * 70, "questions": questions})
    prompts = [request.prompt_ids[: request.params.scored_from] for request in requests]
    yes, no = tiny.odds(prompts[0], "yes"), tiny.odds(prompts[1], "no")
    first, second = answer["answers"]
    assert first["probability"] == pytest.approx(yes / (yes + no), rel=1e-4)
    levels = [tiny.odds(prompts[2], label) for label in ("a", "ab", "b")]
    assert [each["probability"] for each in second["probabilities"]] == pytest.approx(
        [odds / sum(levels) for odds in levels], rel=1e-4
    )
    assert second["score"] == pytest.approx((levels[1] + 2 * levels[2]) / sum(levels), rel=1e-4)


def test_questions_have_the_same_answers_alone_together_and_from_the_cache(tiny: Tiny, monkeypatch: pytest.MonkeyPatch):
    questions = [choice(["a", "ab"]), choice(["b", "ba", "bb"]), {"type": "predicate", "instructions": "Is it so?"}]
    body = {"input": "y" * 200, "questions": questions}
    together, _ = asked_with(tiny.server, monkeypatch, body)
    again, _ = asked_with(tiny.server, monkeypatch, body)
    assert numbers(again["answers"]) == pytest.approx(numbers(together["answers"]), rel=1e-4)
    assert together["usage"]["input_tokens_details"]["cached_tokens"] < 200
    assert again["usage"]["input_tokens_details"]["cached_tokens"] > 200
    for question, answer in zip(questions, together["answers"], strict=True):
        tiny.server.post("/reset_prefix_cache", {})
        alone, _ = asked_with(tiny.server, monkeypatch, {"input": "y" * 200, "questions": [question]})
        assert numbers(alone["answers"]) == pytest.approx(numbers([answer]), rel=1e-4)


def test_one_input_is_computed_once_for_all_questions(monkeypatch: pytest.MonkeyPatch):
    with fake_server() as server:
        questions = [choice(["red", "green", "blue"]), {"type": "predicate", "instructions": "Is it?"}] * 4
        before = server.engine.stats()
        _, requests = asked_with(server, monkeypatch, {"input": "z" * 800, "questions": questions})
        after = server.engine.stats()
    num_computed = after.total_prompt_tokens - before.total_prompt_tokens
    num_computed -= after.total_cached_tokens - before.total_cached_tokens
    assert len(requests) == 4 * 5
    assert 800 < num_computed < 800 + 8 * 150 + 20 * 8  # the input, each question, and each label
    assert after.total_output_tokens == before.total_output_tokens
    assert after.total_steps - before.total_steps < len(requests)


@pytest.mark.parametrize(
    ("logprobs", "temperature", "probs"),
    [
        ([-1.0], 1.0, [1.0]),
        ([-2.0, -2.0], 1.0, [0.5, 0.5]),
        ([-900.0, -1900.0], 1.0, [1.0, 0.0]),
        ([-1.0, -1.0 - math.log(3)], 1.0, [0.75, 0.25]),
        ([-1.0, -1.0 - 2 * math.log(3)], 2.0, [0.75, 0.25]),
        ([-math.inf, -3.0], 1.0, [0.0, 1.0]),
        ([-math.inf, -math.inf], 1.0, [0.5, 0.5]),
    ],
)
def test_probabilities_are_those_given_that_it_is_one_of_them(
    logprobs: list[float], temperature: float, probs: list[float]
):
    assert probabilities(logprobs, temperature) == pytest.approx(probs)


@pytest.mark.parametrize(
    ("probs", "confidence"),
    [([1.0], 1.0), ([0.5, 0.5], 0.0), ([1.0, 0.0], 1.0), ([0.75, 0.25], 0.5), ([0.9998, 0.0001, 0.0001], 0.9997)],
)
def test_the_confidence_of_a_choice_is_how_far_the_best_is_above_an_even_chance(probs: list[float], confidence: float):
    assert choice_confidence(probs) == pytest.approx(confidence)


@pytest.mark.parametrize(
    ("probs", "score", "confidence"),
    [
        ([1.0], 0.0, 1.0),
        ([0.0, 1.0], 1.0, 1.0),
        ([0.5, 0.5], 0.5, 0.0),
        ([0.4, 0.2, 0.4], 1.0, 0.0),
        ([0.0023, 0.116, 0.6753, 0.2064], 2.0858, 0.673),
    ],
)
def test_a_score_is_the_expected_level_and_sure_as_far_as_its_neighbours_are_near(
    probs: list[float], score: float, confidence: float
):
    assert level(probs) == pytest.approx(score)
    assert score_confidence(probs) == pytest.approx(confidence)


def test_a_score_is_never_above_the_highest_level():
    probs = probabilities([-0.1, -0.30000000000000004, -40.0, 17.3])
    assert level(probs) <= 3


def answer_of(values: list[float], ends: list[float]) -> Answer:
    told = tuple(TokenLogprob(1, value) for value in values) or None
    end = [TokenLogprob(2, -9.0, tuple(enumerate(ends)))] if ends else []
    return Answer((), prompt_logprobs=told, logprobs=end, finish_reason=FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("values", "ends", "logprob"),
    [
        ([-1.0, -2.0], [-0.5], -3.5),
        ([], [-0.5], -0.5),  # a label without tokens
        ([-1.0], [], -1.0),  # a model without an end
        ([-1.0], [math.log(0.25), math.log(0.5)], -1 + math.log(0.75)),
        ([-1.0], [-math.inf, -math.inf], -math.inf),
    ],
)
def test_a_label_is_its_tokens_and_any_end_behind_them(values: list[float], ends: list[float], logprob: float):
    assert logprob_of(answer_of(values, ends)) == pytest.approx(logprob)


def test_a_request_that_was_stopped_has_no_answers():
    with pytest.raises(ServingError, match="stopped before its answers were there"):
        logprob_of(Answer((), finish_reason=FinishReason.ABORT))


def test_the_end_is_any_of_the_models(monkeypatch: pytest.MonkeyPatch):
    class TwoEnds(ByteTokenizer):
        eos_ids = frozenset({EOS_ID, 7, 99_999})

    with fake_server(tokenizer=TwoEnds()) as server:
        _, requests = asked_with(server, monkeypatch, {"input": "x", "questions": [choice(["a", "b"])]})
    assert {request.params.logprob_ids for request in requests} == {(7, EOS_ID)}


def test_a_model_without_an_end_compares_labels_alone(monkeypatch: pytest.MonkeyPatch):
    with fake_server(has_eos=False) as server:
        answer, requests = asked_with(server, monkeypatch, {"input": "x", "questions": [choice(["a", "b"])]})
    assert {request.params.logprobs for request in requests} == {None}
    assert [each["probability"] for each in answer["answers"][0]["probabilities"]] == [0.5, 0.5]
