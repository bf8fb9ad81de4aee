"""A grammar that takes long to compile delays its own request only."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from kvloom.contract.config import EngineConfig
from kvloom.contract.request import Delta, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.rank.fake import VOCAB_SIZE, ByteTokenizer, FakeRunner
from kvloom.rank.grammar.guides import Guides, Patience
from kvloom.rank.grammar.reasoning import Guide, Mask
from kvloom.server.chat.grammars import regex_grammar
from tests.support.engine.engines import drain, engine_over, run_all, text_of, tokens_of

DIGITS = regex_grammar("[0-9]{12}", "r")


class Late:
    """A guide that is not ready for the first `num_late` times that it is asked before each token."""

    def __init__(self, guide: Guide, num_late: int) -> None:
        self._guide, self._num_late, self._num_left = guide, num_late, num_late

    def is_ready(self) -> bool:
        self._num_left -= 1
        return self._num_left < 0

    def mask(self) -> Mask | None:
        assert self._num_left < 0, "the step waits for a mask that is not there"
        return self._guide.mask()

    def take(self, token_id: int) -> None:
        self._num_left = self._num_late
        self._guide.take(token_id)

    def is_free(self, num_more: int) -> bool:
        return False

    def problem(self) -> str:
        return self._guide.problem()

    def forced(self) -> Sequence[int]:
        return self._guide.forced()

    def close(self) -> None:
        self._guide.close()


class LateGuides(Guides):
    def __init__(self, num_late: int) -> None:
        super().__init__(ByteTokenizer, VOCAB_SIZE, must_wait=True)
        self._num_late = num_late

    def guide(self, params: SamplingParams) -> Guide | None:
        guide = super().guide(params)
        return None if guide is None else Late(guide, self._num_late)


def engine_with(num_late: int, **config: object) -> Engine:
    sizes = EngineConfig(backend="fake", num_blocks=64, block_size=4, max_seq_len=256)
    runner = FakeRunner(sizes, guides=LateGuides(num_late))
    return engine_over(runner, **config)


def guided(name: str = "guided", length: int = 9, **fields: object) -> Request:
    params = SamplingParams(**{"grammar": DIGITS, "seed": 3, "max_tokens": 40, **fields})
    return Request(name, tuple(range(1, length + 1)), params)


@pytest.mark.parametrize(("run_ahead", "num_guided"), [(False, 3), (True, 1)])
def test_others_get_a_token_a_step_while_a_mask_is_late(run_ahead, num_guided):
    """A step planned behind a token that does not come is void, so with run-ahead a late mask costs two steps."""
    engine = engine_with(5, run_ahead=run_ahead)
    engine.add(Request("stream", (1, 2, 3), SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)))
    engine.step()
    engine.add(guided())
    deltas: list[Delta] = []
    for num_steps in range(1, 20):
        deltas += engine.step()
        engine.check()
        assert len(tokens_of([d for d in deltas if d.request_id == "stream"])) == num_steps
    assert len(tokens_of([d for d in deltas if d.request_id == "guided"])) == num_guided
    assert (engine.stats().total_stale_rows > 0) == run_ahead


@pytest.mark.parametrize("length", [7, 8, 9])
@pytest.mark.parametrize("fields", [{}, {"prompt_logprobs": 2}, {"logprobs": 2}])
@pytest.mark.parametrize("config", [{}, {"num_speculative_tokens": 4}, {"max_tokens_per_step": 5, "max_batch": 4}])
def test_a_late_answer_is_the_same_answer(length, fields, config):
    request = guided(length=length, **fields)
    found = []
    for num_late in (0, 3):
        deltas = run_all(engine_with(num_late, **config), request)[request.id]
        found.append((text_of(deltas), deltas[0].prompt_logprobs, [d.logprobs for d in deltas if d.logprobs]))
        assert len(text_of(deltas)) == 12
    assert found[0] == found[1]


def test_a_late_answer_is_aborted_as_any_other():
    engine = engine_with(1_000_000)
    engine.add(guided())
    for _ in range(5):
        engine.step()
    engine.abort("guided")
    drain(engine)
    assert engine.stats().num_free_blocks == 64


def test_a_grammar_whose_client_is_gone_before_its_turn_is_never_read():
    guides = Guides(ByteTokenizer, VOCAB_SIZE)
    hold, started = threading.Event(), threading.Event()

    def busy() -> None:
        started.set()
        hold.wait(120)

    guides._pool.submit(busy)
    started.wait(120)
    gone, stays = (guides.guide(SamplingParams(grammar=DIGITS)) for _ in range(2))
    assert gone is not None
    assert stays is not None
    gone.close()
    hold.set()
    assert stays.mask() is not None
    assert gone._next.cancelled()


def test_a_step_has_patience_for_all_its_masks_together():
    patience, never = Patience(0.01), Future[Mask]()
    assert not patience.wait(never)
    assert patience._left_s == 0.0
    patience.renew()
    assert patience._left_s == 0.01
    there = Future[Mask]()
    there.set_result(None)
    assert patience.wait(there)


def test_ranks_that_must_agree_wait_for_the_mask_itself():
    assert Patience(None).wait(Future[Mask]())
