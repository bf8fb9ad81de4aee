"""Aborted requests: blocks and ids are freed, the rank drops them, and other requests are unaffected."""

import pytest

from kvloom.contract.config import EngineConfig
from kvloom.contract.messages import Batch, StepOutput
from kvloom.contract.request import FinishReason, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.rank.fake import FakeRunner
from tests.engine.test_engine import GREEDY, prompt, truth
from tests.support.engine.engines import drain, engine_over, fake_engine, run_all, tokens_of


@pytest.mark.parametrize("steps_before", [0, 1, 2, 5])
def test_an_abort_frees_the_blocks_at_once_and_ends_the_request_once(steps_before):
    engine = fake_engine()
    engine.add(Request("a", prompt(9), GREEDY))
    engine.add(Request("b", prompt(9, 100), GREEDY))
    deltas = [delta for _ in range(steps_before) for delta in engine.step()]
    engine.abort("a")
    engine.abort("a")
    engine.abort("unknown")
    free = engine.stats().num_free_blocks
    assert free == 64 - (3 if steps_before else 0) - (1 if steps_before > 4 else 0)
    rest = drain(engine)
    assert [d.finish_reason for d in rest["a"] if d.finish_reason] == [FinishReason.ABORT]
    assert tokens_of([d for d in deltas if d.request_id == "b"] + rest["b"]) == truth(
        Request("b", prompt(9, 100), GREEDY), 12
    )


@pytest.mark.parametrize("is_between_halves", [False, True])
def test_an_id_may_be_used_again_once_its_request_is_aborted(is_between_halves):
    engine = fake_engine()
    engine.add(Request("a", prompt(9), GREEDY))
    for _ in range(3):
        engine.step()
    if is_between_halves:
        engine.start_step()
    engine.abort("a")
    again = Request("a", prompt(9, 100), GREEDY)
    engine.add(again)
    engine.finish_step()
    ended, *deltas = drain(engine)["a"]
    assert (ended.finish_reason, ended.token_ids) == (FinishReason.ABORT, ())
    assert tokens_of(deltas) == truth(again, 12)
    assert [d.finish_reason for d in deltas] == [None] * 11 + [FinishReason.LENGTH]


class RankThatRemembers(FakeRunner):
    """A rank that records in `known` the sequences it was sent and was not told to drop."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.known: set[int] = set()

    def run(self, batch: Batch) -> StepOutput:
        new = {seq.id for seq in batch.new}
        assert not new & self.known
        assert self.known >= set(batch.drop), "what it does not know cannot be dropped"
        self.known = (self.known | new) - set(batch.drop)
        return super().run(batch)


@pytest.mark.parametrize("steps_before", [0, 1, 5])
def test_the_rank_forgets_every_request_that_ended(steps_before):
    """Requests end by an abort, by their length, or by a stop string that is found a step late."""
    rank = RankThatRemembers(EngineConfig(backend="fake", num_blocks=64, block_size=4, max_seq_len=64))
    engine = engine_over(rank)
    stop = bytes(truth(Request("c", prompt(5), GREEDY), 12)).decode()[5:7]
    for request in (
        Request("a", prompt(9), GREEDY),
        Request("b", prompt(7), GREEDY),
        Request("c", prompt(5), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=(stop,))),
    ):
        engine.add(request)
    for _ in range(steps_before):
        engine.step()
    engine.abort("a")
    drain(engine)
    run_all(engine, Request("last", prompt(3), GREEDY))
    assert len(rank.known) <= 1, "of the last one's end the rank hears with the next step"


def test_an_abort_between_the_halves_of_a_step_is_safe():
    engine = fake_engine(num_blocks=9, max_seq_len=36)
    requests = [Request(f"r{i}", prompt(8, 40 * i), GREEDY) for i in range(3)]
    for request in requests:
        engine.add(request)
    engine.start_step()
    engine.abort("r1")
    engine.finish_step()
    found = drain(engine)
    assert tokens_of(found["r0"]) == truth(requests[0], 12)
    assert tokens_of(found["r2"]) == truth(requests[2], 12)
