"""Prompt lookup: which tokens are guessed, what a step does with guesses, and that no guess changes an answer."""

import itertools
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvloom.contract.config import EngineConfig, Limits
from kvloom.contract.errors import BadRequest
from kvloom.contract.messages import Work
from kvloom.contract.request import Delta, FinishReason, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.schedule.blocks import BlockPool
from kvloom.engine.schedule.commit import apply_step, check, commit_step
from kvloom.engine.schedule.guessing import Guesser
from kvloom.engine.schedule.lookup import Match, PromptLookup
from kvloom.engine.schedule.profit import Bid, Turnaround, draft_lengths
from kvloom.engine.schedule.scheduler import plan_step
from kvloom.engine.schedule.seq import Seq
from kvloom.rank.fake import fake_next
from tests.engine.schedule.test_scheduler import BLOCK, counts, make_seq, run_step
from tests.engine.test_engine import EngineMachine, prompt, truth
from tests.support.engine.engines import fake_engine, run_all, tokens_of

LIMITS = Limits(4, 16, BLOCK, max_draft_tokens=8)


# -- which tokens are guessed


def guessed(lookup: PromptLookup, tokens: list[int], most: int = 10) -> tuple[list[int], int]:
    guess = lookup.propose(tokens, most)
    return list(guess.tokens), guess.size


def test_what_followed_the_last_time_is_guessed():
    assert guessed(PromptLookup(2, 3), [5, 6, 7, 8, 9, 1, 5, 6], 4) == ([7, 8, 9, 1], 2)


def test_the_longest_match_wins_and_of_equal_ones_the_latest():
    assert guessed(PromptLookup(1, 3), [1, 2, 3, 4, 9, 3, 5, 9, 1, 2, 3], 2) == ([4, 9], 3)
    assert guessed(PromptLookup(1, 1), [3, 4, 3, 5, 3], 2) == ([5, 3], 1)


def test_a_text_that_is_predicted_is_looked_up_too():
    lookup = PromptLookup(2, 4, [5, 6, 7, 8, 9])
    assert guessed(lookup, [1, 5, 6], 2) == ([7, 8], 2)
    assert guessed(lookup, [1, 5, 6, 7, 8], 2) == ([9], 4)
    assert guessed(lookup, [1, 5, 6, 7, 8, 9], 2) == ([], 0)


def test_nothing_is_guessed_when_the_end_is_new_or_nothing_is_wanted():
    nothing = ([], 0)
    assert guessed(PromptLookup(2, 3), [1, 2, 3, 4, 5]) == nothing
    assert guessed(PromptLookup(2, 3), [1, 2, 1, 2], 0) == nothing
    assert guessed(PromptLookup(2, 3), [1, 1]) == nothing
    assert guessed(PromptLookup(1, 3), [1]) == nothing


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.lists(st.integers(1, 9), max_size=9),
    st.sampled_from([(1, [1]), (1, [2, 1]), (2, [8, 4, 2]), (3, [7, 3])]),
)
def test_a_guess_is_what_a_plain_search_finds_however_the_tokens_came(tokens, cuts, sizes):
    low, sizes = sizes

    def search() -> tuple[list[int], int]:
        for size in sizes:
            for end in range(len(tokens) - 1, size - 1, -1):
                if len(tokens) > size and tokens[end - size : end] == tokens[-size:]:
                    return tokens[end : end + 5], size
        return [], 0

    lookup, length = PromptLookup(low, sizes[0]), 0
    for cut in cuts:
        length = min(len(tokens), length + cut)
        lookup.propose(tokens[:length], 5)
    assert guessed(lookup, tokens, 5) == search()


def test_of_a_very_long_sequence_the_last_tokens_are_looked_up(monkeypatch):
    monkeypatch.setattr("kvloom.engine.schedule.lookup._INDEXED_TOKENS", 6)
    assert guessed(PromptLookup(2, 2), [1, 2, 7, *range(10, 20), 1, 2]) == ([], 0)
    assert guessed(PromptLookup(2, 2), [*range(10, 20), 1, 2, 7, 1, 2]) == ([7, 1, 2], 2)


# -- how likely they are


def test_a_token_is_as_likely_as_guesses_like_it_were_right_and_all_before_it():
    guesser = Guesser(PromptLookup(2, 8), 32)
    tokens = [1, 2, *range(3, 12), 1, 2]
    guesser.follow(tokens, 100)
    before = guesser.chances()
    assert before == sorted(before, reverse=True)
    assert len(before) == len(guesser.guess.tokens) == 11
    for token in (3, 4, 5):
        tokens.append(token)
        guesser.follow(tokens, 100)
    assert guesser.chances()[0] > before[0]
    tokens.append(99)
    guesser.follow(tokens, 100)
    assert not guesser.guess.tokens
    tokens += [1, 2]
    guesser.follow(tokens, 100)
    assert guesser.guess.tokens[0] == 3
    assert guesser.guess.kinds[0] == 2
    assert guesser.chances()[0] > before[0]  # the guess behind as few tokens was right; the wrong one came behind more
    tokens += [98, 1, 2]
    guesser.follow(tokens, 100)
    assert guesser.chances()[0] < (before[0] * 2 * 0.9 + 1) / (2 * 0.9 + 1)


def test_a_guess_is_as_long_as_is_asked_for():
    guesser = Guesser(PromptLookup(1, 1), 3)
    guesser.follow([1, 2, 3, 4, 5, 1], 100)
    assert guesser.guess.tokens == [2, 3, 4]
    guesser.follow([1, 2, 3, 4, 5, 1], 2)
    assert guesser.guess.tokens == [2, 3]


# -- how many pay


@pytest.mark.parametrize(
    ("chances", "num_seqs", "gap_s", "lengths"),
    [
        ([[0.9, 0.8, 0.05]], 1, 0.0, [2]),  # a row takes a tenth of the step
        ([[0.09, 0.05]], 1, 0.0, [0]),
        ([[]], 1, 0.0, [0]),
        ([[0.9] * 40], 1, 0.0, [40]),
        ([[0.15]], 1, 0.1, [0]),  # what is lost by not running ahead is more than it brings
        ([[0.15]], 1, 0.0, [1]),
        ([[0.9, 0.5], [0.95, 0.2]], 2, 0.0, [2, 1]),
        ([[0.9, 0.8], []], 10, 0.0, [0, 0]),  # ten sequences bring as much with each tenth of a step
        ([[0.9] * 40, []], 2, 0.0, [19, 0]),  # the other one does not wait for longer than three steps
    ],
)
def test_rows_are_added_while_they_bring_more_than_the_step(chances, num_seqs, gap_s, lengths):
    assert draft_lengths([Bid(own, 0.1) for own in chances], num_seqs, 1.0, gap_s) == lengths


def speed(bids: list[Bid], lengths: list[int], num_seqs: int, gap_s: float) -> float:
    """Tokens a second of steps that take one second without drafts."""
    right = sum(sum(bid.chances[:length]) for bid, length in zip(bids, lengths, strict=True))
    rows_s = sum(bid.row_s * length for bid, length in zip(bids, lengths, strict=True))
    return (num_seqs + right) / (1 + rows_s + gap_s * any(lengths))


@given(
    st.lists(st.lists(st.floats(0, 1), max_size=4).map(lambda own: sorted(own, reverse=True)), min_size=1, max_size=2),
    st.floats(0.001, 0.4),
    st.floats(0, 0.5),
)
def test_no_other_lengths_are_faster(chances, row_s, gap_s):
    bids, num_seqs = [Bid(own, row_s) for own in chances], len(chances)
    best = speed(bids, draft_lengths(bids, num_seqs, 1.0, gap_s), num_seqs, gap_s)
    for lengths in itertools.product(*(range(len(own) + 1) for own in chances)):
        if num_seqs == 1 or sum(lengths) * row_s <= 2:
            assert speed(bids, list(lengths), num_seqs, gap_s) <= best * (1 + 1e-9)


def test_what_a_rank_waits_for_is_learned_where_nothing_runs_ahead():
    turn = Turnaround()
    for now_s in (0.0, 10.0, 20.0):  # a step takes the rank 6 s, and its messages 1 s
        turn.sent(now_s, is_alone=True)
        turn.ended(now_s + 7.0, 6.0, waits=True)
    assert turn.seconds == 4.0
    turn.sent(30.0, is_alone=False)
    turn.ended(31.0, 0.1, waits=True)
    assert turn.seconds == 4.0
    turn.ended(31.0, 0.1, waits=False)
    turn.sent(1000.0, is_alone=True)  # nobody asked for anything
    turn.ended(1001.0, 1.0, waits=False)
    assert turn.seconds == 4.0


# -- what a step does with guesses


def decoding(pool: BlockPool, drafts: list[list[int]], length: int = 4) -> list[Seq]:
    """Sequences with one token to compute, and drafts. The first has `length` tokens computed, the others 4."""
    seqs = [make_seq(i, 4 if i else length, first=20 * i) for i in range(len(drafts))]
    run_step(seqs, pool, LIMITS)
    for seq, draft in zip(seqs, drafts, strict=True):
        seq.draft = draft
    return seqs


def test_a_decode_takes_its_guesses_along():
    pool = BlockPool(8)
    (seq,) = decoding(pool, [[1, 2, 3, 4, 5]])
    plan = plan_step([seq], pool, LIMITS)
    assert apply_step(plan, pool) == [Work(0, 4, 6, 1, [1, 2], [1, 2, 3, 4, 5])]


@pytest.mark.parametrize(("num_right", "num_blocks"), [(0, 2), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_right_guesses_count_and_the_blocks_of_wrong_ones_are_given_back(num_right, num_blocks):
    pool = BlockPool(8)
    (seq,) = decoding(pool, [[1, 2, 3, 4, 5]])
    plan = plan_step([seq], pool, LIMITS)
    apply_step(plan, pool)
    commit_step(plan, {0: [*[1, 2, 3, 4, 5][:num_right], 9]}, pool, BLOCK)
    check([seq], pool, BLOCK)
    assert seq.token_ids == [0, 1, 2, 3, 7, *[1, 2, 3, 4, 5][:num_right], 9]
    assert (seq.num_computed, len(seq.block_table), seq.draft) == (5 + num_right, num_blocks, [])


def test_only_blocks_without_a_wrong_guess_are_found_by_others():
    pool = BlockPool(8)
    (seq,) = decoding(pool, [[1, 2, 3]])
    plan = plan_step([seq], pool, LIMITS)
    apply_step(plan, pool)
    commit_step(plan, {0: [1, 2, 9]}, pool, BLOCK)  # the second block is full, but its last token is wrong
    assert pool.num_cached == 1
    run_step([seq], pool, LIMITS)
    assert pool.num_cached == 2
    assert pool.match(seq.hashes) == seq.block_table[:2]


def test_guesses_share_what_is_allowed_and_get_what_the_others_leave():
    pool = BlockPool(32)
    seqs = decoding(pool, [list(range(9))] * 2)
    assert counts(plan_step(seqs, pool, LIMITS)) == {0: 1 + 4, 1: 1 + 4}
    prefill = make_seq(2, 11, first=90)
    assert counts(plan_step([*seqs, prefill], pool, LIMITS)) == {0: 1 + 3, 1: 1, 2: 11}
    assert counts(plan_step(seqs, pool, Limits(4, 16, BLOCK))) == {0: 1, 1: 1}


def test_guesses_take_no_block_that_somebody_needs():
    pool = BlockPool(4)
    seqs = decoding(pool, [[1] * 4, [1] * 8], length=3)
    plan = plan_step(seqs, pool, LIMITS)  # two blocks are free; the second sequence needs one for its own token
    assert counts(plan) == {0: 1 + 4, 1: 1 + 3}
    assert plan.preempted == ()


def test_a_resumed_sequence_computes_what_it_knows_before_it_guesses():
    pool = BlockPool(8)
    seq = make_seq(0, 6)
    seq.draft = [1, 2]
    assert counts(plan_step([seq], pool, LIMITS)) == {0: 6}


def test_a_prefill_in_chunks_does_not_guess():
    pool, limits = BlockPool(8), Limits(4, 16, BLOCK, max_prefill_tokens=4, max_draft_tokens=8)
    seq = make_seq(0, 12)
    run_step([seq], pool, limits)
    seq.draft = [1, 2]
    assert counts(plan_step([seq], pool, limits)) == {0: 4}


# -- no guess changes an answer


class HalfRightLookup(PromptLookup):
    """Guesses the fake model's next tokens, with a wrong one wherever a checksum of the text so far says so."""

    every = 5  # about one guess in this many is wrong

    def propose(self, token_ids, most, forced=()):
        context, draft = [*token_ids, *forced], []
        for _ in range(min(4, most)):
            token = fake_next(context, SamplingParams(temperature=0), 0)
            context.append(token if sum(context) % self.every else (token + 1) % 256)
            draft.append(context[-1])
        return Match(draft, 8)


@pytest.fixture
def guessing(monkeypatch):
    monkeypatch.setattr("kvloom.engine.schedule.guessing.PromptLookup", HalfRightLookup)
    return {"num_speculative_tokens": 4, "max_draft_tokens": 9}


GREEDY = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)


def shown(deltas: list[Delta]) -> list[Delta]:
    """Without what is told of guesses."""
    return [replace(delta, num_guessed=(0, 0)) for delta in deltas]


def test_answers_come_in_fewer_steps_and_guesses_are_counted(guessing):
    plain, engine = fake_engine(num_speculative_tokens=0), fake_engine(**guessing)
    requests = [Request(f"r{i}", prompt(9, 30 * i), GREEDY) for i in range(3)]
    want, got = run_all(plain, *requests), run_all(engine, *requests)
    assert {id: tokens_of(d) for id, d in got.items()} == {id: tokens_of(d) for id, d in want.items()}
    stats = engine.stats()
    assert 0 < stats.total_accepted_tokens < stats.total_draft_tokens
    assert sum(stats.accepted_by_position) == stats.total_accepted_tokens
    assert [stats.total_drafts, *stats.accepted_by_position] == sorted(
        [stats.total_drafts, *stats.accepted_by_position], reverse=True
    )
    assert stats.total_steps < plain.stats().total_steps
    assert stats.total_output_tokens == 75
    assert plain.stats().total_draft_tokens == 0


def test_an_answer_ends_in_the_middle_of_right_guesses(guessing):
    answer = truth(Request("a", prompt(5), GREEDY), 25)
    stop = bytes(answer[5:7]).decode()
    for params, reason in (
        (SamplingParams(temperature=0, max_tokens=7, ignore_eos=True), FinishReason.LENGTH),
        (SamplingParams(temperature=0, max_tokens=25, ignore_eos=True, stop=(stop,)), FinishReason.STOP),
        (SamplingParams(temperature=0, max_tokens=25, ignore_eos=True, stop_token_ids=(answer[6],)), FinishReason.STOP),
    ):
        engine, request = fake_engine(**guessing), Request("a", prompt(5), params)
        want, got = run_all(fake_engine(), request)["a"], run_all(engine, request)["a"]
        assert shown(got) == want
        assert got[-1].finish_reason is reason
        assert engine.stats().num_free_blocks == 64


@settings(max_examples=60)
@given(
    num_blocks=st.integers(9, 20),
    max_tokens=st.integers(4, 40),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    every=st.integers(1, 9),
    max_preempt=st.sampled_from([None, 0]),
    num_host_blocks=st.sampled_from([0, 6]),
)
def test_too_few_blocks_chunks_swaps_and_cached_prefixes_change_no_answer(
    num_blocks, max_tokens, lengths, every, max_preempt, num_host_blocks
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HalfRightLookup, "every", every)
        patch.setattr("kvloom.engine.schedule.guessing.PromptLookup", HalfRightLookup)
        engine = fake_engine(
            num_blocks, max_seq_len=36, max_batch=4, max_tokens_per_step=max_tokens, max_preempt=max_preempt,
            num_speculative_tokens=4, num_host_blocks=num_host_blocks,
        )  # fmt: skip
        params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=16) for i in range(len(lengths))]
        requests = [Request(f"r{i}", prompt(n, i % 2), params[i]) for i, n in enumerate(lengths)]
        found = run_all(engine, *requests)
    for request in requests:
        tokens = tokens_of(found[request.id])
        assert tokens == truth(request, len(tokens))
        assert found[request.id][-1].finish_reason is not None
    assert engine.stats().num_free_blocks == num_blocks


class GuessingMachine(EngineMachine):
    """The same arrivals, steps and aborts, with speculation."""

    FIELDS: ClassVar = {"num_speculative_tokens": 4, "prompt_lookup_min": 1}


TestGuessingMachine = GuessingMachine.TestCase


def test_an_answer_that_was_predicted_comes_in_fewer_steps_and_its_guesses_are_told():
    plain = Request("a", prompt(9), GREEDY)
    answer = truth(plain, 25)
    predicted = Request("b", prompt(9), GREEDY, prediction=(*answer[:12], 3, 1, *answer[14:]))
    engine, other = fake_engine(num_speculative_tokens=-1), fake_engine()
    want, got = run_all(other, plain)["a"], run_all(engine, predicted)["b"]
    assert tokens_of(got) == tokens_of(want) == answer
    assert engine.stats().total_steps < other.stats().total_steps
    right, wrong = got[-1].num_guessed
    assert right > 5
    assert wrong > 0
    assert (right, right + wrong) == (engine.stats().total_accepted_tokens, engine.stats().total_draft_tokens)


def test_log_probabilities_are_those_of_the_answer(guessing):
    request = Request("a", prompt(5), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2))
    assert shown(run_all(fake_engine(**guessing), request)["a"]) == run_all(fake_engine(), request)["a"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_speculative_tokens": -2}, "num_speculative_tokens: must be at least -1, got -2"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min: must be at least 1, got 0"),
        ({"prompt_lookup_min": 9}, "prompt_lookup_max: must be at least 9, got 8"),
        ({"max_draft_tokens": -1}, "max_draft_tokens: must not be negative, got -1"),
    ],
)
def test_what_cannot_be_is_refused(fields, message):
    with pytest.raises(BadRequest, match=message):
        EngineConfig(backend="fake", **fields)
