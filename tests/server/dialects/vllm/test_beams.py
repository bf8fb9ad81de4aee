"""Beam search returns the likeliest of all possible answers; vLLM's POST /generate uses it."""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.contract.request import FinishReason, TokenLogprob
from kvloom.contract.sampling import SamplingParams
from kvloom.rank.fake import ByteTokenizer, fake_next
from kvloom.server.serving.beams import Beams, BeamSearch, End, Hypothesis
from tests.support.servers import FakeServer, fake_server
from tests.support.waiting import until

EOS = 0
Table = dict[tuple[int, ...], list[float]]  # log-probabilities of tokens 0, 1 and 2 after so many tokens


def end_of(ids: tuple[int, ...]) -> End | None:
    return (FinishReason.EOS, None) if ids[-1] == EOS else None


def searched(table: Table, beams: Beams, max_tokens: int, num_prompt: int = 1) -> BeamSearch:
    search = BeamSearch(beams, num_prompt, max_tokens, end_of)
    while not search.is_over:
        following = []
        for beam in search.live:
            top = sorted(enumerate(table[beam.token_ids]), key=lambda pair: -pair[1])[: 2 * beams.width]
            following.append(TokenLogprob(*top[0], tuple(top)))
        search.take(following)
    return search


def every_answer(table: Table, max_tokens: int) -> dict[tuple[int, ...], float]:
    """Every possible answer, with the sum of its log-probabilities."""
    found = {}
    for length in range(1, max_tokens + 1):
        for ids in itertools.product(range(3), repeat=length):
            is_whole = ids[-1] == EOS or length == max_tokens
            if EOS not in ids[:-1] and is_whole:
                found[ids] = sum(table[ids[:i]][ids[i]] for i in range(length))
    return found


MAX = 3
PREFIXES = [ids for length in range(MAX) for ids in itertools.product((1, 2), repeat=length)]
TABLES = st.fixed_dictionaries(
    {ids: st.lists(st.floats(-9, -0.01), min_size=3, max_size=3, unique=True) for ids in PREFIXES}
)


@given(TABLES, st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.integers(1, 5))
def test_beams_enough_for_all_find_the_best_of_all(table: Table, length_penalty: float, num_prompt: int):
    beams = Beams(10, length_penalty, "never")
    found = searched(table, beams, MAX, num_prompt).best(3)

    def score(ids: tuple[int, ...], total: float) -> float:
        return total / float(num_prompt + len(ids) - (ids[-1] == EOS)) ** length_penalty

    right = sorted((score(*item) for item in every_answer(table, MAX).items()), reverse=True)[:3]
    assert [one.score(beams, num_prompt) for one in found] == pytest.approx(right)
    assert [one.total for one in found] == pytest.approx([sum(p.logprob for p in one.logprobs) for one in found])


@given(TABLES, st.integers(1, 3), st.sampled_from([True, False, "never"]))
def test_every_answer_of_a_search_has_an_end(table: Table, width: int, early_stopping: Any):
    found = searched(table, Beams(width, 1.0, early_stopping), MAX).best(width)
    assert len(found) == width
    assert len({one.token_ids for one in found}) == width
    for one in found:
        is_ended = one.token_ids[-1] == EOS
        assert one.end == ((FinishReason.EOS if is_ended else FinishReason.LENGTH), None)
        assert is_ended or len(one.token_ids) == MAX
        assert EOS not in one.token_ids[:-1]


def test_a_beam_that_begins_badly_may_end_best():
    """Greedy takes token 1 and then only has unlikely tokens; two beams find the better answer."""
    table: Table = {(): [-9, -0.1, -0.2], (1,): [-5, -6, -7], (2,): [-0.1, -8, -9]}
    assert searched(table, Beams(1, 0.0), 2).best(1)[0].token_ids == (1, 0)
    assert searched(table, Beams(2, 0.0), 2).best(1)[0].token_ids == (2, 0)


def test_when_a_search_is_over():
    table: Table = {(): [-0.1, -0.2, -9], (1,): [-1, -0.05, -9], (1, 1): [-0.05, -9, -9]}
    assert searched(table, Beams(1, 1.0, True), 3).best(1)[0].token_ids == (0,)
    assert searched(table, Beams(1, 1.0, False), 3, num_prompt=1).best(1)[0].token_ids in {(0,), (1, 1, 0)}
    assert Hypothesis((1, 2), total=-4.0).score(Beams(1, 2.0), 2) == -4.0 / 16


# -- vLLM's route


def ask(server: FakeServer, **fields: Any) -> Any:
    body = {"prompt": "hello", "use_beam_search": True, "temperature": 0, "n": 2, "best_of": 3, "max_tokens": 6}
    return server.post("/generate", {**body, **fields})


def _oracle(prompt: str, width: int, max_tokens: int) -> list[str]:
    """The same search over the fake model's log-probabilities."""
    ids, params = tuple(prompt.encode()), SamplingParams(temperature=0)
    search = BeamSearch(
        Beams(width), len(ids), max_tokens, lambda ids: None if ids[-1] < 256 else (FinishReason.EOS, None)
    )
    while not search.is_over:
        following = []
        for beam in search.live:
            likeliest = fake_next([*ids, *beam.token_ids], params, 0)
            others = [((likeliest + i) % 256, -0.5 - i) for i in range(1, 2 * width)]
            following.append(TokenLogprob(likeliest, -0.5, ((likeliest, -0.5), *others)))
        search.take(following)
    return [prompt + ByteTokenizer().decode(one.token_ids) for one in search.best(width)]


@pytest.mark.parametrize("prompt", ["hello", "abc", "a longer prompt than a block of the cache"])
def test_the_best_beams_are_answered(server: FakeServer, prompt: str):
    texts = ask(server, prompt=prompt).json()["text"]
    assert texts == _oracle(prompt, 3, 6)[:2]
    assert len(set(texts)) == 2
    frames = ask(server, prompt=prompt, stream=True).content.split(b"\0")[:-1]
    answers = [prompt, prompt]
    for frame in frames:
        answers = [answer + more for answer, more in zip(answers, json.loads(frame)["text"], strict=True)]
    assert answers == texts


def test_a_stop_string_and_a_stop_token_end_a_beam(server: FakeServer):
    [text] = ask(server, n=1).json()["text"]
    stop = text[7]
    for fields in ({"stop": [stop]}, {"stop_token_ids": [ord(stop)]}):
        for answer in ask(server, **fields).json()["text"]:
            assert stop not in answer[5:]
        kept = ask(server, **fields, include_stop_str_in_output=True, early_stopping=True, best_of=2, n=2)
        assert any(answer.endswith(stop) for answer in kept.json()["text"])


class Euros(ByteTokenizer):
    """Every token is the end of a euro sign, a letter, and the beginning of the next euro sign."""

    def token_bytes(self, token_id: int) -> bytes:
        return b"\xaca\xe2\x82" if token_id < 256 else super().token_bytes(token_id)


def test_the_text_of_a_beam_ends_at_a_whole_character_and_at_the_stop_string_that_comes_first():
    with fake_server(tokenizer=Euros(), has_eos=False) as server:
        assert ask(server, max_tokens=3).json()["text"] == ["hello\ufffda€a€a"] * 2
        assert ask(server, max_tokens=3, stop=["a€", "\ufffda"]).json()["text"] == ["hello"] * 2


def test_an_answer_ends_with_the_context():
    with fake_server(max_seq_len=16, has_eos=False) as server:
        assert [len(text) for text in ask(server, max_tokens=15).json()["text"]] == [16, 16]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"temperature": 1.0}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"top_k": 3}, "top_k"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"best_of": 1, "n": 1}, "best_of"),
        ({"best_of": 11}, "best_of"),
        ({"length_penalty": 1e9}, "length_penalty"),
        ({"early_stopping": "sometimes"}, "early_stopping"),
        ({"guided_regex": "a"}, "use_beam_search"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
    ],
)
def test_what_does_not_go_with_a_search_is_refused(server: FakeServer, fields: dict[str, Any], name: str):
    refused = ask(server, **fields)
    assert (refused.status_code, refused.json()["error"].split(":")[0]) == (422, name)


def test_a_search_is_one_request_and_can_be_stopped(server: FakeServer):
    meter = server.health.models.default.meter
    before = meter.num_received
    ask(server)
    assert (meter.num_received, server.admission.num_active) == (before + 1, 0)


@pytest.mark.parametrize("streams", [False, True])
def test_a_search_that_is_stopped_in_its_first_step_has_all_its_answers(streams: bool):
    with fake_server(step_s=1.0) as server, ThreadPoolExecutor() as pool:
        asked = pool.submit(ask, server, prompt="hello", stream=streams)
        until(lambda: server.engine._engine.has_work)
        server.post("/sleep?mode=abort")
        reply = asked.result()
        assert reply.status_code == 200, reply.text
        text = json.loads(reply.content.split(b"\0")[0])["text"]
        assert text == (["", ""] if streams else ["hello", "hello"])
