"""Guesses of a draft model: what is believed of them, what they cost, and who takes them."""

import pytest

from kvloom.contract.config import EngineConfig
from kvloom.contract.messages import BY_MODEL, Drafted, DraftLoad, Forced, StepOutput
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.contract.tokenizer import Tokenizer
from kvloom.engine.drafting import Drafting
from kvloom.engine.live import Arrivals, Live
from kvloom.engine.schedule.by_model import MOST_BY_MODEL, Belief, ModelCost, Price
from kvloom.engine.schedule.cost import Load
from kvloom.engine.schedule.guessing import FORCED, MODEL, Guesser
from kvloom.engine.schedule.lookup import PromptLookup
from kvloom.engine.schedule.pace import Pace
from kvloom.engine.schedule.profit import Base, Bid, best_rate, draft_lengths
from kvloom.engine.schedule.seq import Seq, Status
from kvloom.rank.byte_tokenizer import ByteTokenizer

VOCABULARY: Tokenizer = ByteTokenizer()


# -- what is believed


def test_a_new_sequence_begins_with_what_is_known_of_the_others():
    everyone = Belief()
    first = everyone.chance
    one = Belief(everyone)
    for _ in range(200):
        one.learn(is_right=False)
    assert one.chance < everyone.chance < 0.1
    assert Belief(everyone).chance == everyone.chance
    for _ in range(2000):
        everyone.rest()
    assert everyone.chance == pytest.approx(first, rel=0.01)  # what did not pay is tried again
    for _ in range(2000):
        one.rest()
    assert one.chance == pytest.approx(first, rel=0.02)


def guessing(model: Belief | None = None) -> Guesser:
    return Guesser(PromptLookup(2, 4), 32, model=model or Belief())


def test_a_guess_by_model_begins_with_forced_tokens_and_names_no_others():
    guesser = guessing()
    guesser.follow([1, 2, 3], 5, forced=[7, 8])
    assert list(guesser.guess.tokens) == [7, 8]
    assert (guesser.by_model.tokens, guesser.by_model.kinds) == ([7, 8, *[BY_MODEL] * 3], [FORCED] * 2 + [MODEL] * 3)
    assert not guesser.is_by_model
    guesser.choose(by_model=True)
    assert guesser.is_by_model
    assert guesser.guess == guesser.by_model != guesser.by_text
    guesser.follow([1, 2, 3], 100)
    assert len(guesser.by_model.tokens) == MOST_BY_MODEL


def test_what_was_drafted_by_model_is_judged_up_to_the_first_wrong_token():
    everyone = Belief()
    guesser, other = guessing(everyone), guessing(everyone)
    before = everyone.chance
    guesser.follow([1, 2], 9, forced=[3])
    guesser.follow([1, 2, 3, 4, 5], 9, drafted=Drafted(0, [3, 4, 6, 9], 5))
    assert guesser.num_read == 4  # the fifth token was read as a wrong one
    other.follow([1], 9)
    once = everyone.chance
    assert guesser.by_model.chances[0] == pytest.approx((0.93 + 8 * once) / (1.93 + 8))  # one right, one wrong
    assert other.by_model.chances[0] == once < before
    guesser.follow([1, 2, 3, 4, 5, 6, 7], 9, drafted=Drafted(0, [6, 7], 7))
    assert everyone.chance > once
    guesser.follow([1, 2, 3, 4, 5, 6, 7, 8], 9, drafted=Drafted(0, [], 3))  # it only reads
    assert guesser.num_read == 3


def test_a_sequence_that_drafts_nothing_by_model_forgets_a_little():
    guesser = guessing()
    guesser.follow([1], 9)
    guesser.follow([1, 2], 9, drafted=Drafted(0, [5], 1))
    guesser.choose(by_model=True)
    low = guesser.by_model.chances[0]
    guesser.decided(1)
    guesser.follow([1, 2], 9)
    assert guesser.by_model.chances[0] == low
    guesser.decided(0)
    guesser.follow([1, 2], 9)
    assert guesser.by_model.chances[0] > low


# -- what it costs


def seq_of(length: int, max_len: int = 1000) -> Seq:
    seq = Seq(0, [1] * length, length, status=Status.RUNNING, num_computed=length - 1)
    seq.max_len = max_len
    return seq


def taught() -> ModelCost:
    """Of which a pass takes 8 ms, a token 1 ms, and a sample nothing."""
    cost = ModelCost()
    for num_passes in (1, 2, 4, 8) * 20:
        for num_tokens in (8, 40, 100):
            seconds = 0.008 * num_passes + 0.001 * num_tokens
            cost.learn(DraftLoad(num_passes, num_tokens, 8, 0, seconds))
    return cost


def test_before_the_first_pass_guesses_seem_free():
    assert ModelCost().price(seq_of(9), 0, 2, 1) == Price(0.0, 2)
    assert ModelCost().room(1.0) == 0


def test_a_pass_is_shared_and_a_text_is_read_for_many_guesses():
    cost = taught()
    assert cost.price(seq_of(9), 9, 0, 1).pass_s == pytest.approx(0.009, rel=0.1)
    assert cost.price(seq_of(9), 9, 0, 4).pass_s == pytest.approx(0.003, rel=0.1)
    read, unread = (cost.price(seq_of(513), num, 0, 1).pass_s for num in (513, 1))
    assert unread - read == pytest.approx(512 * 0.001 / 487, rel=0.1)  # of the answer 487 tokens are left
    near_its_end = cost.price(seq_of(513, max_len=514), 1, 0, 1).pass_s
    assert near_its_end > 0.5
    assert cost.room(0.05) == pytest.approx(50, rel=0.1)


def test_tokens_that_are_given_cost_no_pass():
    free, dear = Bid([0.9, 0.8], 0.1).rates(), Bid([0.9, 0.8], 0.1, pass_s=0.3, num_given=1).rates()
    assert dear[0] == free[0]
    assert dear[1] == pytest.approx((0.8 / 0.4, 0.4))
    assert draft_lengths([Bid([0.9, 0.8], 0.1, pass_s=10.0, num_given=1)], Base(1, 1.0, 0.0)) == [1]


def test_the_best_rate_is_that_of_the_best_length():
    assert best_rate(Bid([0.9, 0.1], 0.1), 1.0) == pytest.approx(1.9 / 1.1)
    assert best_rate(Bid([0.01], 0.1), 1.0) == 1.0


# -- who takes them


def lives(*prompts: list[int]) -> list[Live]:
    arrivals, found = Arrivals(EngineConfig(backend="fake"), VOCABULARY), []
    for i, ids in enumerate(prompts):
        live = arrivals.live(Request(f"r{i}", tuple(ids), SamplingParams(max_tokens=500)), 4000)
        live.seq.status, live.seq.num_computed = Status.RUNNING, len(ids) - 1
        found.append(live)
    return found


def drafting(pass_s: float | None, pace_s: tuple[float, float] = (0.02, 0.001)) -> Drafting:
    """Steps take 20 ms and 1 ms a row, passes of the draft model `pass_s`; None = it was never asked."""
    pace = Pace()
    for num in (1, 2, 4, 8) * 50:
        pace._cost.learn(Load(num, num, 0), pace_s[0] + pace_s[1] * num)
    found = Drafting(EngineConfig(model="m", draft_model="d"), pace, lambda: 0.0)
    for num, width in ((1, 1), (2, 8), (4, 1), (8, 8)) * 50 if pass_s is not None else ():
        found._model_cost.learn(DraftLoad(num, num * width, num * width, 0, (pass_s or 0.0) * num))
    return found


def drafts(drafting: Drafting, asked: list[Live], *forced: Forced) -> list[list[int]]:
    for live in asked:
        if live.guesser is None:
            drafting.begin(live)
    drafting.draft(asked, StepOutput([], [], 0.0, forced=list(forced)), runs_ahead=False)
    return [live.seq.draft for live in asked]


def test_a_draft_model_is_asked_for_what_pays():
    (draft,) = drafts(drafting(0.002), lives([1, 2, 3]))
    assert 2 <= len(draft) == draft.count(BY_MODEL) < MOST_BY_MODEL
    (dearer,) = drafts(drafting(0.008), lives([1, 2, 3]))
    assert 0 < len(dearer) < len(draft)
    assert drafts(drafting(0.05), lives([1, 2, 3])) == [[]]
    (first,) = drafts(drafting(None), lives([1, 2, 3]))
    assert first


def test_before_the_first_step_nothing_is_drafted():
    new = Drafting(EngineConfig(model="m", draft_model="d"), Pace(), lambda: 0.0)
    assert drafts(new, lives([1, 2, 3])) == [[]]


def test_a_text_that_repeats_is_surer_and_costs_no_pass():
    repeats = [*range(1, 30), *range(1, 20)]
    (by_text,) = drafts(drafting(0.004), lives(repeats))
    assert by_text[:3] == [20, 21, 22]


def test_forced_tokens_come_first():
    asked = lives([1, 2, 3])
    (draft,) = drafts(drafting(0.002), asked, Forced(asked[0].seq.id, [8, 9]))
    assert draft[:3] == [8, 9, BY_MODEL]


def test_a_pass_that_pays_for_many_is_not_made_for_one_of_them():
    own = drafting(0.01, (0.02, 0.0001))
    asked = lives(*[[i, 2 * i, 3 * i] for i in range(1, 9)])
    assert all(drafts(own, asked))
    for live in asked[1:]:
        assert live.guesser is not None
        assert live.guesser._model is not None
        live.guesser._model._count += 500
    assert drafts(own, asked) == [[]] * 8


def test_a_sequence_with_a_step_under_way_drafts_behind_the_token_of_that_step():
    own, asked = drafting(0.002), lives([1, 2, 3])
    asked[0].seq.num_computing = 1
    assert drafts(own, asked) == [[]]
    assert not asked[0].seq.may_run_ahead
    asked[0].seq.num_computing = 0
    assert drafts(own, asked) != [[]]
