"""What decisions are to the engine and to who watches it: cancelled, counted, of a tenant, or refused."""

import pytest

from kvloom.contract.request import Request
from kvloom.server.secure.api_keys import new_key
from tests.server.dialects.decisions.test_decisions import CHOICE, PREDICATE, decided, refused
from tests.support.servers import MODEL, fake_server
from tests.support.waiting import until


def test_a_client_that_leaves_takes_its_questions_along():
    with fake_server(step_s=0.02) as server:
        body = {"input": "x" * 1500, "questions": [{**PREDICATE, "instructions": f"Is it {i}?"} for i in range(50)]}
        server.leave("/v1/decisions", body, lambda: server.engine.stats().num_running > 0)
        until(lambda: server.engine.stats().num_running + server.engine.stats().num_waiting == 0)
        until(lambda: server.admission.num_active == 0)
        until(lambda: server.engine.stats().num_free_blocks == server.engine.stats().num_blocks)


def test_decisions_are_counted_as_a_request_that_generates_nothing():
    with fake_server() as server:
        usage = decided(server, input="x" * 300, questions=[PREDICATE, CHOICE])["usage"]
        meter = server.health.models.default.meter
        assert (meter.num_received, meter.num_answers, meter.output_tokens.sum) == (1, 4, 0)
        assert 0 < meter.computed_tokens.sum < usage["input_tokens"] + 4 * 16
        assert server.engine.stats().total_output_tokens == 0


def test_all_requests_of_decisions_are_of_their_tenant(monkeypatch: pytest.MonkeyPatch):
    key = new_key()
    with fake_server(keys=[key]) as server:
        got: list[Request] = []
        open_feed = server.engine.open
        monkeypatch.setattr(server.engine, "open", lambda requests: (got.extend(requests), open_feed(requests))[1])
        body = {"model": MODEL, "input": "x", "questions": [PREDICATE], "priority": 2}
        assert server.post("/v1/decisions", body).status_code == 401
        answer = server.post("/v1/decisions", body, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200
    assert len(got) == 2
    assert all(request.tenant and request.priority == 2 for request in got)


def test_what_the_engine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch):
    with fake_server() as server:
        server.engine.info.lacks["prompt_logprobs"] = "it tells none"
        message = refused(server, "/v1/decisions", {"input": "x", "questions": [PREDICATE]})
    assert message == "prompt_logprobs: the engine of this model cannot do it: it tells none"
