"""Engine over the fake model, whose every answer is known: equalities that must hold whatever the schedule does."""

from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvloom.contract.errors import BadRequest
from kvloom.contract.request import Delta, FinishReason, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.rank.fake import EOS_ID, fake_answer
from tests.support.engine.engines import drain, fake_engine, run_all, text_of, tokens_of

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def truth(request: Request, num_tokens: int) -> list[int]:
    return fake_answer(request.prompt_ids, request.params, request.params.seed or 0, num_tokens)


def prompt(length: int, first: int = 1) -> tuple[int, ...]:
    return tuple((first + i) % 256 for i in range(length))


def test_tokens_and_text_are_those_of_the_model():
    request = Request("a", prompt(9), GREEDY)
    deltas = run_all(fake_engine(), request)["a"]
    assert tokens_of(deltas) == truth(request, 12)
    assert text_of(deltas) == bytes(truth(request, 12)).decode()
    assert [d.finish_reason for d in deltas] == [None] * 11 + [FinishReason.LENGTH]


def test_a_cached_prefix_gives_the_same_answer_and_is_counted():
    engine = fake_engine()
    request = Request("a", prompt(17), GREEDY)
    cold = run_all(engine, request)["a"]
    warm = run_all(engine, Request("b", request.prompt_ids, GREEDY))["b"]
    assert tokens_of(warm) == tokens_of(cold)
    assert (cold[0].num_cached_tokens, warm[0].num_cached_tokens) == (0, 16)
    salted = run_all(engine, Request("c", request.prompt_ids, GREEDY, cache_salt="other"))["c"]
    assert salted[0].num_cached_tokens == 0


def test_a_batch_gives_each_request_what_it_gets_alone():
    requests = [Request(f"r{i}", prompt(3 + 5 * i, i), SamplingParams(seed=i, max_tokens=9)) for i in range(6)]
    together = run_all(fake_engine(), *requests)
    for request in requests:
        alone = run_all(fake_engine(), request)[request.id]
        assert tokens_of(together[request.id]) == tokens_of(alone)


@settings(max_examples=60)
@given(
    num_blocks=st.integers(9, 20),
    max_tokens=st.integers(4, 40),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    is_caching=st.booleans(),
)
def test_too_few_blocks_change_no_answer(num_blocks, max_tokens, lengths, is_caching):
    engine = fake_engine(
        num_blocks, max_seq_len=36, max_batch=4, max_tokens_per_step=max_tokens, enable_prefix_cache=is_caching
    )
    requests = [
        Request(f"r{i}", prompt(n, i % 2), SamplingParams(seed=i, max_tokens=16)) for i, n in enumerate(lengths)
    ]
    found = run_all(engine, *requests)
    for request in requests:
        tokens = tokens_of(found[request.id])
        assert tokens == truth(request, len(tokens))
        assert found[request.id][-1].finish_reason is not None
    assert engine.stats().num_free_blocks == num_blocks


def test_preempted_and_resumed_requests_answer_as_if_they_had_not_been():
    engine = fake_engine(num_blocks=9, max_seq_len=36)
    requests = [Request(f"r{i}", prompt(8, 40 * i), SamplingParams(seed=i, max_tokens=20)) for i in range(3)]
    found = run_all(engine, *requests)
    assert engine.stats().total_preemptions > 0
    for request in requests:
        assert tokens_of(found[request.id]) == truth(request, len(tokens_of(found[request.id])))


def test_the_end_of_sequence_token_ends_the_answer_and_is_not_text():
    asked = (Request("a", prompt(4, i), SamplingParams(temperature=0)) for i in range(999))
    request = next(one for one in asked if EOS_ID in truth(one, 20))
    deltas = run_all(fake_engine(), request)["a"]
    assert (deltas[-1].finish_reason, deltas[-1].token_ids) == (FinishReason.EOS, (EOS_ID,))
    assert "<eos>" not in text_of(deltas)
    for skips, shows in ((False, False), (True, True), (False, True)):
        params = SamplingParams(temperature=0, skip_special_tokens=skips, include_stop=shows)
        told = run_all(fake_engine(), Request("a", request.prompt_ids, params))["a"]
        assert text_of(told) == text_of(deltas) + "<eos>" * (shows and not skips)


def test_a_stop_string_ends_the_answer_and_frees_its_blocks():
    answer = bytes(truth(Request("a", prompt(5), GREEDY), 12)).decode()
    stop = answer[5:7]
    engine = fake_engine()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=(stop,))
    deltas = run_all(engine, Request("a", prompt(5), params))["a"]
    assert text_of(deltas) == answer[: answer.index(stop)]
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].stop_reason == stop
    assert engine.stats().num_free_blocks == 64
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)


def test_a_stop_token_ends_the_answer_without_its_text_unless_asked_for():
    tokens = truth(Request("a", prompt(5), GREEDY), 12)
    for include_stop, count in ((False, tokens.index(tokens[4])), (True, tokens.index(tokens[4]) + 1)):
        params = SamplingParams(
            temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=(tokens[4],), include_stop=include_stop
        )
        deltas = run_all(fake_engine(), Request("a", prompt(5), params))["a"]
        assert text_of(deltas) == bytes(tokens[:count]).decode()
        assert deltas[-1].stop_reason == tokens[4]
        assert tokens_of(deltas) == tokens[: tokens.index(tokens[4]) + 1]


def test_text_held_back_for_a_stop_string_comes_with_the_last_token():
    answer = bytes(truth(Request("a", prompt(5), GREEDY), 12)).decode()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=(answer[-2:] + "never",))
    assert text_of(run_all(fake_engine(), Request("a", prompt(5), params))["a"]) == answer


def test_text_held_back_for_a_stop_string_comes_with_an_abort():
    engine, answer = fake_engine(), bytes(truth(Request("a", prompt(5), GREEDY), 12)).decode()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=(answer + "never",))
    engine.add(Request("a", prompt(5), params))
    deltas: list[Delta] = []
    while len(tokens_of(deltas)) < 6:
        deltas += engine.step()
    assert text_of(deltas) == ""
    engine.abort("a")
    deltas += engine.step()
    assert (text_of(deltas), deltas[-1].finish_reason) == (answer[: len(tokens_of(deltas))], FinishReason.ABORT)


def test_no_stop_string_ends_an_answer_below_its_minimum_length():
    answer = bytes(truth(Request("a", prompt(5), GREEDY), 12)).decode()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=tuple(set(answer)), min_tokens=7)
    deltas = run_all(fake_engine(), Request("a", prompt(5), params))["a"]
    assert (text_of(deltas), deltas[-1].stop_reason) == (answer[:7], answer[7])


def test_log_probabilities_come_with_each_token_and_each_prompt_token():
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    engine = fake_engine(max_batch=2, max_tokens_per_step=4)
    deltas = run_all(engine, Request("a", prompt(11), params))["a"]
    assert [d.logprobs[0].token_id for d in deltas] == tokens_of(deltas)
    assert all(len(d.logprobs[0].top) == 2 for d in deltas)
    values = deltas[0].prompt_logprobs
    assert values is not None
    assert values[0] is None
    assert [value.token_id for value in values[1:] if value] == list(prompt(11)[1:])
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])


@pytest.mark.parametrize("num_host_blocks", [0, 20])
@pytest.mark.parametrize("max_tokens_per_step", [4, 512], ids=["half-way", "later"])
def test_log_probabilities_of_a_prompt_are_told_once_even_when_its_request_is_preempted(
    num_host_blocks, max_tokens_per_step
):
    params = SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=0, ignore_eos=True)
    sizes = {"max_batch": 3, "max_tokens_per_step": max_tokens_per_step}
    engine = fake_engine(num_blocks=9, max_seq_len=36, num_host_blocks=num_host_blocks, **sizes)
    found = run_all(engine, *(Request(f"r{i}", prompt(16, 40 * i), params) for i in range(3)))
    assert engine.stats().total_preemptions > 0
    for i in range(3):
        told = [delta.prompt_logprobs for delta in found[f"r{i}"] if delta.prompt_logprobs is not None]
        assert [[value and value.token_id for value in values] for values in told] == [[None, *prompt(16, 40 * i)[1:]]]


def test_a_context_is_no_longer_than_all_blocks_hold():
    engine = fake_engine(num_blocks=4, block_size=4, max_seq_len=64)
    assert engine.max_seq_len == 16
    with pytest.raises(BadRequest, match="16"):
        engine.add(Request("a", prompt(17), GREEDY))
    deltas = run_all(engine, Request("b", prompt(10), GREEDY))["b"]
    assert (len(tokens_of(deltas)), deltas[-1].finish_reason) == (6, FinishReason.LENGTH)


def test_no_tokens_wanted_is_an_empty_answer():
    (delta,) = run_all(fake_engine(), Request("a", prompt(3), SamplingParams(max_tokens=0)))["a"]
    assert (delta.text, delta.finish_reason) == ("", FinishReason.LENGTH)


def test_the_seed_in_use_is_reported_unless_greedy():
    engine = fake_engine()
    drawn = run_all(engine, Request("a", prompt(3), SamplingParams(max_tokens=4)))["a"][0].seed
    assert drawn is not None
    again = run_all(fake_engine(), Request("b", prompt(3), SamplingParams(max_tokens=4, seed=drawn)))["b"]
    assert again[0].seed == drawn
    assert run_all(engine, Request("c", prompt(3), GREEDY))["c"][0].seed is None


def test_an_engine_with_a_seed_draws_the_same_seeds_again():
    def seeds() -> list[int | None]:
        found = run_all(
            fake_engine(seed=5), *(Request(f"r{i}", prompt(3), SamplingParams(max_tokens=1)) for i in range(3))
        )
        return [deltas[0].seed for deltas in found.values()]

    assert seeds() == seeds()
    assert len(set(seeds())) == 3


@pytest.mark.parametrize(
    ("request_", "field", "words"),
    [
        (Request("a", ()), "prompt", "is empty"),
        (Request("a", prompt(64)), "prompt", "must fit in 64"),
        (Request("a", (1, 999)), "prompt", "token id 999"),
        (Request("a", (1, -1)), "prompt", "token id -1"),
        (Request("a", (1,), SamplingParams(logit_bias={999: 1.0})), "logit_bias", "token id 999"),
    ],
)
def test_a_request_that_can_never_run_is_refused(request_, field, words):
    with pytest.raises(BadRequest, match=words) as caught:
        fake_engine().add(request_)
    assert caught.value.field == field


def test_a_request_id_in_use_is_refused_and_free_again_afterwards():
    engine = fake_engine()
    engine.add(Request("a", prompt(3), GREEDY))
    with pytest.raises(BadRequest, match="in use"):
        engine.add(Request("a", prompt(3), GREEDY))
    drain(engine)
    engine.add(Request("a", prompt(3), GREEDY))


@pytest.mark.parametrize("preempts", [False, True])
@pytest.mark.parametrize("num_host_blocks", [0, 64])
def test_a_reset_prefix_cache_is_found_by_nobody_and_changes_no_answer(preempts: bool, num_host_blocks: int):
    engine = fake_engine(num_host_blocks=num_host_blocks)
    prompt = tuple(range(20))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    first = run_all(engine, Request("a", prompt, params))
    assert engine.stats().num_cached_blocks > 0
    engine.add(Request("b", prompt, params))
    for _ in range(4):
        engine.step()
    engine.reset_prefix_cache(preempts)
    engine.check()
    assert (engine.stats().num_cached_blocks, engine.stats().total_preemptions) == (0, int(preempts))
    last = run_all(engine, Request("c", prompt, params))
    assert tokens_of(last["c"]) == tokens_of(first["a"])
    assert last["c"][-1].num_cached_tokens == 0 or preempts  # "b" may have recomputed it before
    assert tokens_of(last["b"]) == tokens_of(first["a"])[-len(tokens_of(last["b"])) :]
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_fail_all_ends_every_request_once_and_the_engine_works_on_after_a_reset():
    engine = fake_engine()
    for name in "ab":
        engine.add(Request(name, prompt(5), GREEDY))
    engine.step()
    deltas = engine.fail_all("gone")
    ends = {d.request_id: d for d in deltas if d.finish_reason}
    assert {name: (d.finish_reason, d.error) for name, d in ends.items()} == {
        "a": (FinishReason.ERROR, "gone"),
        "b": (FinishReason.ERROR, "gone"),
    }
    engine.reset()
    assert not engine.has_work
    assert engine.stats().num_free_blocks == 64


def whole_answer(request: Request, max_seq_len: int) -> tuple[list[int], str, FinishReason]:
    """What a request that is not aborted gets, derived token by token from the truth: tokens, text, reason."""
    params, limit = request.params, request.max_len(max_seq_len) - len(request.prompt_ids)
    tokens, text = truth(request, limit), ""
    for count, token in enumerate(tokens, 1):
        if token == EOS_ID:
            return tokens[:count], text, FinishReason.EOS
        if token in params.stop_token_ids:
            return tokens[:count], text, FinishReason.STOP
        text += chr(token)
        for stop in params.stop:
            if stop in text:
                return tokens[:count], text[: text.index(stop)], FinishReason.STOP
    return tokens, text, FinishReason.LENGTH


class EngineMachine(RuleBasedStateMachine):
    """Random arrivals, halves of steps and aborts, with and without steps planned ahead: every answer is complete and
    true, or a prefix of the true one if it was aborted; each request ends once.
    """

    FIELDS: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, Request] = {}
        self.deltas: dict[str, list[Delta]] = {}
        self.ended: set[str] = set()
        self.in_step = False

    @initialize(run_ahead=st.booleans())
    def make(self, run_ahead: bool) -> None:
        sizes = {"num_blocks": 9, "max_seq_len": 36, "max_batch": 3, "max_tokens_per_step": 9}
        self.engine = fake_engine(**sizes, **self.FIELDS, run_ahead=run_ahead)

    @rule(
        length=st.integers(1, 30),
        first=st.sampled_from([0, 50]),
        max_tokens=st.integers(0, 20),
        stop=st.sampled_from(["", "", "e", "t ", "never"]),
        stop_token=st.sampled_from([(), (), tuple(b"aeiou")]),
        scored_from=st.none() | st.integers(0, 30),
    )
    def arrive(
        self, length: int, first: int, max_tokens: int, stop: str, stop_token: tuple[int, ...], scored_from: int | None
    ) -> None:
        name, seed = f"r{len(self.requests)}", len(self.requests)
        stops, scored = (stop,) if stop else (), None if scored_from is None else 0
        params = SamplingParams(seed=seed, max_tokens=max_tokens, stop=stops, stop_token_ids=stop_token)
        params = replace(params, prompt_logprobs=scored, scored_from=min(length, scored_from or 0))
        self.requests[name] = Request(name, prompt(length, first), params)
        self.engine.add(self.requests[name])

    @precondition(lambda self: not self.in_step)
    @rule()
    def start(self) -> None:
        for delta in self.engine.start_step():
            assert delta.request_id not in self.ended, "a delta after the last"
            self.deltas.setdefault(delta.request_id, []).append(delta)
            if delta.finish_reason:
                self.ended.add(delta.request_id)
        self.in_step = True

    @precondition(lambda self: self.in_step)
    @rule()
    def finish(self) -> None:
        self.engine.finish_step()
        self.in_step = False

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(sorted(self.requests))))

    @invariant()
    def answers_are_true(self) -> None:
        for name, deltas in self.deltas.items():
            tokens = tokens_of(deltas)
            assert tokens == truth(self.requests[name], len(tokens))
        self.engine.check()

    def teardown(self) -> None:
        if self.in_step:
            self.finish()
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.start()
            self.finish()
        assert self.ended == set(self.requests)
        for name, deltas in self.deltas.items():
            whole = whole_answer(self.requests[name], self.engine.max_seq_len)
            found = tokens_of(deltas), text_of(deltas), deltas[-1].finish_reason
            if deltas[-1].finish_reason is FinishReason.ABORT:
                assert found[0] == whole[0][: len(found[0])]
                held_back = "".join(self.requests[name].params.stop)  # what may begin a stop string is shown at the end
                assert (whole[1] + held_back).startswith(found[1])
            else:
                assert found == whole
        assert self.engine.stats().num_free_blocks == 9


TestEngineMachine = EngineMachine.TestCase


def test_blocks_that_are_given_back_are_found_by_nobody_and_the_answers_stay():
    engine = fake_engine(num_blocks=16)
    request = Request("a", prompt(17), GREEDY)
    cold = run_all(engine, request)["a"]
    assert engine.stats().num_cached_blocks > 0
    engine.release_free()
    engine.check()
    assert (engine.stats().num_cached_blocks, engine.stats().num_free_blocks) == (0, 16)
    again = run_all(engine, Request("b", request.prompt_ids, GREEDY))["b"]
    assert (tokens_of(again), again[0].num_cached_tokens) == (tokens_of(cold), 0)


def test_blocks_that_were_given_back_are_handed_out_from_the_first_on():
    engine = fake_engine(num_blocks=16)
    for name in "abc":
        run_all(engine, Request(name, prompt(9, ord(name)), GREEDY))
    engine.release_free()
    engine.add(Request("d", prompt(9), GREEDY))
    engine.step()
    assert next(iter(engine._seqs.values())).seq.block_table == [0, 1, 2]
