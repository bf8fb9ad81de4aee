"""The engine as a library, over a rank with the fake model."""

import queue
from collections.abc import Iterator

import pytest

from kvloom.engine.api import Code, EndFlag, InferenceEngine, InferenceRequest, InferenceResponse, Operation, Status
from kvloom.engine.config import EngineConfig
from kvloom.engine.fake import fake_answer
from kvloom.engine.request import SamplingParams

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
Responses = queue.Queue[InferenceResponse]


@pytest.fixture
def running() -> Iterator[tuple[InferenceEngine, Responses]]:
    engine, responses = InferenceEngine(), queue.Queue()
    assert engine.init(responses.put, EngineConfig(backend="fake", num_blocks=64, fake_step_s=0.001)).is_ok()
    yield engine, responses
    assert engine.Finalize().IsOk()


def rest(responses: Responses) -> list[InferenceResponse]:
    """Responses up to the one that ends a request."""
    found = [responses.get(timeout=20)]
    while not found[-1].is_eos():
        found.append(responses.get(timeout=20))
    return found


def test_tokens_come_one_by_one_and_the_last_says_why(running):
    engine, responses = running
    assert engine.Forward(InferenceRequest(7, (1, 2, 3), GREEDY, max_output_len=5)).IsOk()
    found = rest(responses)
    assert [token for r in found for token in r.output_ids] == fake_answer((1, 2, 3), GREEDY, 0, 5)
    assert found[-1].get_flags() == EndFlag.REACH_MAX_OUTPUT_LEN
    assert {r.get_request_id() for r in found} == {7}
    assert engine.GetProcessingRequest() == (Status(), 0)
    assert engine.GetMaxBatchSize() == (Status(), 64)
    assert engine.get_request_block_quotas()[1][1:] == (64, 512)


def test_a_stopped_request_ends_with_cancel(running):
    engine, responses = running
    engine.forward(InferenceRequest("long", (1,), GREEDY))
    assert engine.forward(InferenceRequest("long", (1,), GREEDY)) == Status(Code.INVALID_ARG)
    responses.get(timeout=20)
    assert engine.ControlRequest("long", Operation.STOP).is_ok()
    assert rest(responses)[-1].flags is EndFlag.CANCEL
    assert engine.control_request("long", Operation.STOP) == Status(Code.NOT_FOUND)


def test_a_prompt_outside_the_vocabulary_is_illegal_input(running):
    engine, responses = running
    engine.forward(InferenceRequest(1, (9999,), GREEDY))
    assert rest(responses)[-1].flags is EndFlag.ILLEGAL_INPUT


def test_an_engine_that_cannot_start_says_so(tmp_path):
    engine = InferenceEngine()
    assert engine.init(print, str(tmp_path / "none.json")).status_code() is Code.ERROR
    (tmp_path / "bad.json").write_text('{"backend": 3}')
    assert engine.init(print, str(tmp_path / "bad.json")) == Status(Code.INVALID_ARG)
    assert engine.forward(InferenceRequest(1, (1,))) == engine.finalize() == Status(Code.ERROR)
