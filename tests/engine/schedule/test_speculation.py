"""Prompt lookup: which tokens are guessed, what a step does with guesses, and that no guess changes an answer."""

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
from kvloom.engine.schedule.lookup import Match, PromptLookup
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


def test_what_came_behind_the_end_of_the_last_time_is_found():
    lookup = PromptLookup(2, 2)
    assert guessed(lookup, [1, 2, 3]) == ([], 0)
    assert guessed(lookup, [1, 2, 3, 7, 2, 3]) == ([7, 2, 3], 2)
    assert guessed(lookup, [1, 2, 3, 7, 2, 3, 8, 2, 3]) == ([8, 2, 3], 2)


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
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=9),
    st.sampled_from([(1, [1]), (1, [2, 1]), (2, [8, 4, 2]), (3, [7, 3]), (2, [5, 2])]),
    st.booleans(),
)
def test_a_guess_is_what_a_plain_search_finds_however_the_tokens_came(tokens, cuts, sizes, only_long):
    low, sizes = sizes
    largest, sizes = sizes[0], [size for size in sizes if size >= 4 or not only_long]

    def search() -> tuple[list[int], int]:
        for size in sizes:
            for end in range(len(tokens) - 1, size - 1, -1):
                if len(tokens) > size and tokens[end - size : end] == tokens[-size:]:
                    return tokens[end : end + 5], size
        return [], 0

    lookup, length = PromptLookup(low, largest), 0
    for cut, is_long in cuts:
        length = min(len(tokens), length + cut)
        lookup.propose(tokens[:length], 5, only_long=is_long)
    found = lookup.propose(tokens, 5, only_long=only_long)
    assert (list(found.tokens), found.size) == search()


def test_of_a_very_long_sequence_the_last_tokens_are_looked_up(monkeypatch):
    monkeypatch.setattr("kvloom.engine.schedule.lookup._INDEXED_TOKENS", 6)
    assert guessed(PromptLookup(2, 2), [1, 2, 7, *range(10, 20), 1, 2]) == ([], 0)
    assert guessed(PromptLookup(2, 2), [*range(10, 20), 1, 2, 7, 1, 2]) == ([7, 1, 2], 2)


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

    def propose(self, token_ids, most, forced=(), only_long=False):
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
