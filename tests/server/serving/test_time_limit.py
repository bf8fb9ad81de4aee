"""e2eTimeout: a request that takes longer ends with an error, whether it waits or runs, and frees its slot."""

import json

import pytest

from tests.support.servers import FakeServer, fake_server
from tests.support.waiting import until

TOLD = "the request was ended after 0.3 s, as e2eTimeout says"


@pytest.fixture
def slow():
    with fake_server(has_eos=False, step_s=0.02, max_link_num=1, card={"time_limit_s": 0.3}) as server:
        yield server


def test_a_whole_answer_is_a_504(slow: FakeServer):
    answer = slow.chat(max_tokens=1000)
    assert (answer.status_code, answer.json()["error"]["message"]) == (504, TOLD)
    until(lambda: slow.engine.stats().num_running == 0)
    assert slow.admission.num_active == 0
    assert slow.post("/generate", {"inputs": "hi", "parameters": {"max_new_tokens": 500}}).json() == {
        "error": TOLD, "error_type": "timeout"
    }  # fmt: skip


def test_a_stream_ends_with_it(slow: FakeServer):
    lines = [line for line in slow.chat(max_tokens=1000, stream=True).text.splitlines() if line.startswith("data: {")]
    assert len(lines) > 1
    assert json.loads(lines[-1][6:])["error"]["message"] == TOLD


def test_it_counts_from_the_requests_coming(slow: FakeServer):
    """The second request waits for the slot of the first, and the time spent waiting counts."""
    with slow.client.stream(
        "POST", "/v1/completions", json={"prompt": "hi", "max_tokens": 1000, "stream": True}
    ) as first:
        next(first.iter_lines())
        answer = slow.complete("hi", max_tokens=1000)
        assert (answer.status_code, answer.json()["error"]["message"]) == (504, TOLD)


def test_what_is_quick_enough_is_answered(slow: FakeServer):
    assert slow.complete("hi", max_tokens=2).status_code == 200
