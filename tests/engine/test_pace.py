"""Pace: how much of others' prompts a step computes while somebody waits for a next token."""

import pytest

from kvloom.contract.config import EngineConfig, Limits
from kvloom.contract.errors import BadRequest
from kvloom.contract.messages import Batch
from kvloom.contract.request import Request, SamplingParams
from kvloom.engine.engine import Engine
from kvloom.engine.link.executor import InProcessExecutor
from kvloom.engine.schedule.pace import FIRST_TOKENS, LEAST_DEAR_TOKENS, LEAST_TOKENS, Pace
from kvloom.engine.schedule.seq import Seq, Status
from kvloom.rank.fake import ByteTokenizer, FakeRunner
from tests.support.engines import tokens_of

LIMITS = Limits(max_batch=8, max_tokens=512, block_size=16)


def decoding() -> Seq:
    return Seq(1, [1, 2, 3], 2, status=Status.RUNNING, num_computed=2)


def prefilling(may_reuse: bool = True) -> Seq:
    return Seq(2, [1] * 400, 400, may_reuse=may_reuse)


def budget(pace: Pace, *seqs: Seq) -> int:
    return pace.limited(LIMITS, seqs).prefill_tokens


def test_prompts_have_the_whole_budget_where_nobody_waits_for_a_token():
    pace = Pace(0.05)
    pace.learn([prefilling()], 512, 10.0)
    assert pace.limited(LIMITS, [prefilling()]) is LIMITS


@pytest.mark.parametrize(
    ("token_s", "expected"), [(None, FIRST_TOKENS), (0.0005, 100), (0.01, LEAST_TOKENS), (0.00001, 512)]
)
def test_a_step_with_a_decoding_sequence_computes_what_fits_in_its_time(token_s, expected):
    pace = Pace(0.05)
    if token_s is not None:
        pace.learn([prefilling()], 100, 100 * token_s)
    assert budget(pace, decoding(), prefilling()) == expected


def test_a_slow_step_counts_at_once_and_quick_ones_bit_by_bit():
    pace = Pace(0.1)
    pace.learn([prefilling()], 100, 0.02)
    assert budget(pace, decoding()) == 500
    pace.learn([prefilling()], 100, 0.1)
    assert budget(pace, decoding()) == 100
    pace.learn([prefilling()], 100, 0.02)
    assert budget(pace, decoding()) == 119
    for _ in range(60):
        pace.learn([prefilling()], 100, 0.02)
    assert budget(pace, decoding()) == 499


def test_steps_of_few_tokens_teach_nothing():
    pace = Pace(0.05)
    pace.learn([decoding()], 1, 1.0)
    assert budget(pace, decoding()) == FIRST_TOKENS


def test_prompts_of_which_every_token_is_wanted_are_counted_apart():
    pace = Pace(0.05)
    pace.learn([prefilling(may_reuse=False)], 100, 1.0)
    assert budget(pace, decoding(), prefilling(may_reuse=False)) == LEAST_DEAR_TOKENS
    assert budget(pace, decoding(), prefilling()) == FIRST_TOKENS


def test_nothing_is_held_back_where_it_is_switched_off():
    pace = Pace(0.0)
    pace.learn([prefilling()], 100, 10.0)
    assert pace.limited(LIMITS, [decoding(), prefilling()]) is LIMITS


def test_its_time_must_not_be_negative():
    with pytest.raises(BadRequest, match="pace_s"):
        EngineConfig(backend="fake", pace_s=-1.0)


class Recorder(InProcessExecutor):
    def __init__(self) -> None:
        super().__init__(
            FakeRunner(
                EngineConfig(backend="fake", num_blocks=256, max_seq_len=4096, fake_token_s=0.001), lambda _: None
            )
        )
        self.batches: list[Batch] = []

    def submit(self, batch: Batch) -> None:
        self.batches.append(batch)
        super().submit(batch)


@pytest.mark.parametrize("prompt_logprobs", [None, 3])
def test_a_long_prompt_beside_a_stream_is_computed_in_small_steps_and_answers_the_same(prompt_logprobs):
    found = {}
    for pace_s in (0.0, 0.1):
        executor = Recorder()
        config = EngineConfig(backend="fake", max_tokens_per_step=512, pace_s=pace_s)
        engine = Engine(config, executor, ByteTokenizer())
        engine.add(Request("stream", (1, 2, 3), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)))
        deltas = [*engine.step(), *engine.step()]
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, prompt_logprobs=prompt_logprobs)
        engine.add(Request("long", tuple(range(1, 251)) * 8, params))
        while engine.has_work:
            deltas += engine.step()
        mine = [delta for delta in deltas if delta.request_id == "long"]
        found[pace_s] = tokens_of(mine), mine[0].prompt_logprobs
        sizes = [sum(work.num_tokens for work in batch.work) for batch in executor.batches]
        with_stream = [
            size for size, batch in zip(sizes, executor.batches, strict=True) if 0 in {w.id for w in batch.work}
        ]
        assert max(with_stream) == (512 if pace_s == 0.0 else FIRST_TOKENS + 1)
    assert found[0.0] == found[0.1]
