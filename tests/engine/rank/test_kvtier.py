"""An outer KV tier under the engine: it never changes an answer, and other requests do not wait for it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvloom.contract.config import EngineConfig, TierConfig
from kvloom.contract.errors import BadRequest
from kvloom.contract.messages import Moved, Transfer
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.engine.schedule.blocks import extend_chain
from kvloom.engine.schedule.transfers import Moves
from kvloom.rank.fake import fake_answer
from tests.support.engine.engines import drain, run_all, tokens_of
from tests.support.engine.tiers import FakeTier, tiered_engine

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def prompt(length: int, first: int = 1) -> tuple[int, ...]:
    return tuple((first + i) % 256 for i in range(length))


def truth(request: Request, num_tokens: int) -> list[int]:
    return fake_answer(request.prompt_ids, request.params, request.params.seed or 0, num_tokens)


def answer(engine: Engine, request: Request) -> tuple[list[int], int]:
    """The answer's tokens, and how many of the prompt's tokens came from a cache."""
    deltas = run_all(engine, request)[request.id]
    return tokens_of(deltas), deltas[-1].num_cached_tokens


def filled(request: Request) -> dict[bytes, list[int]]:
    """The contents of a tier after an engine answered `request`."""
    engine, tier, _ = tiered_engine()
    answer(engine, request)
    return tier.stored


REQUEST = Request("a", prompt(17), GREEDY)


def test_a_new_engine_finds_in_the_tier_what_an_old_one_computed_answer_included():
    stored = filled(REQUEST)
    engine, _, _ = tiered_engine(stored)
    assert answer(engine, REQUEST) == (truth(REQUEST, 8), 16)
    longer = Request("b", (*REQUEST.prompt_ids, *truth(REQUEST, 8)), GREEDY)
    other, _, _ = tiered_engine(stored)
    assert answer(other, longer) == (truth(longer, 8), 24)
    assert other.stats().total_tier_loaded_blocks == 6


def test_what_is_cached_locally_is_not_asked_for():
    engine, tier, _ = tiered_engine()
    answer(engine, REQUEST)
    asked = len(tier.loads)
    assert answer(engine, Request("b", REQUEST.prompt_ids, GREEDY)) == (truth(REQUEST, 8), 16)
    assert len(tier.loads) == asked
    saved = engine.stats().total_tier_saved_blocks
    assert saved == len(tier.stored) == 6


def test_a_local_prefix_is_continued_from_the_tier():
    stored = filled(REQUEST)
    engine, tier, _ = tiered_engine(stored)
    answer(engine, Request("b", REQUEST.prompt_ids[:9], GREEDY))
    tier.loads.clear()
    assert answer(engine, REQUEST) == (truth(REQUEST, 8), 16)
    assert [len(load.keys) for load in tier.loads] == [2]


def test_requests_of_other_salts_and_those_that_want_prompt_logprobs_take_nothing():
    stored = filled(REQUEST)
    engine, tier, _ = tiered_engine(stored)
    salted = Request("b", REQUEST.prompt_ids, GREEDY, cache_salt="other")
    assert answer(engine, salted) == (truth(salted, 8), 0)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    engine, tier, _ = tiered_engine(stored)
    assert answer(engine, Request("c", REQUEST.prompt_ids, params)) == (truth(REQUEST, 8), 0)
    assert tier.loads == []


def test_others_go_on_while_a_request_waits_for_its_blocks():
    engine, tier, _ = tiered_engine(filled(REQUEST))
    tier.delay = 6
    engine.add(REQUEST)
    engine.step()
    engine.add(Request("b", prompt(3, 90), GREEDY))
    order = []
    while engine.has_work:
        order += [delta.request_id for delta in engine.step() if delta.token_ids]
        engine.check()
    assert order[0] == "b", "the request behind did not overtake the one that waits"
    assert order.count("a") == order.count("b") == 8


def test_requests_with_one_prefix_load_it_once():
    engine, tier, _ = tiered_engine(filled(REQUEST))
    tier.delay = 3
    requests = [Request(f"r{i}", REQUEST.prompt_ids, GREEDY) for i in range(4)]
    found = run_all(engine, *requests)
    assert len(tier.loads) == 1
    assert [(tokens_of(found[r.id]), found[r.id][-1].num_cached_tokens) for r in requests] == [
        (truth(REQUEST, 8), 16)
    ] * 4


def test_a_load_that_never_ends_costs_its_deadline_and_its_blocks_stay_its_own():
    engine, tier, clock = tiered_engine(filled(REQUEST))
    tier.delay = 10**9
    engine.add(REQUEST)
    for _ in range(5):
        assert engine.step() == []
    assert engine.is_stalled
    clock.now_s = 1.2
    deltas = [delta for _ in range(12) for delta in engine.step()]
    assert tokens_of(deltas) == truth(REQUEST, 8)
    assert deltas[-1].num_cached_tokens == 0
    engine.check()
    held = tier.loads[0].blocks
    assert engine.stats().num_free_blocks <= 64 - len(held)
    tier.waiting = [(0, is_load, transfer) for _, is_load, transfer in tier.waiting]
    drain(engine)
    assert engine.stats().num_free_blocks == 64


def test_an_aborted_request_leaves_its_blocks_to_the_load_until_it_ends():
    engine, tier, _ = tiered_engine(filled(REQUEST), num_blocks=16)
    tier.delay = 4
    engine.add(REQUEST)
    engine.step()
    engine.abort("a")
    other = Request("b", prompt(40, 100), GREEDY)
    engine.add(other)
    deltas = drain(engine)
    assert tokens_of(deltas["b"]) == truth(other, 8)
    assert deltas["a"][-1].finish_reason is not None


@pytest.mark.parametrize("found", [0, 1, 3])
def test_blocks_behind_the_first_that_is_missing_are_computed_whatever_lies_in_them(found):
    engine, tier, _ = tiered_engine(filled(REQUEST))
    tier.finds = lambda count: found
    assert answer(engine, REQUEST) == (truth(REQUEST, 8), 4 * found)


@pytest.mark.parametrize(
    "reports",
    [
        lambda moved: [Moved(m.id, 99) for m in moved],
        lambda moved: [Moved(m.id, -1) for m in moved],
        lambda moved: [*moved, *moved, Moved(10**6, 1)],
    ],
    ids=["too many", "negative", "twice, and one that was never asked for"],
)
def test_a_tier_that_reports_nonsense_changes_no_answer(reports):
    engine, tier, _ = tiered_engine(filled(REQUEST))
    tier.reports = reports
    assert answer(engine, REQUEST)[0] == truth(REQUEST, 8)
    assert engine.stats().num_free_blocks == 64


@pytest.mark.parametrize("method", ["load", "save"])
def test_a_tier_that_raises_is_a_miss(method, monkeypatch, caplog):
    def fail(self: FakeTier, transfer: Transfer) -> None:
        raise RuntimeError("broken")

    stored = filled(REQUEST)
    monkeypatch.setattr(FakeTier, method, fail)
    engine, _, _ = tiered_engine(stored)
    assert answer(engine, REQUEST) == (truth(REQUEST, 8), 0 if method == "load" else 16)
    assert engine.stats().num_free_blocks == 64
    assert "refused a transfer" in caplog.text


def test_a_tier_whose_poll_raises_is_taken_for_down(monkeypatch, caplog):
    engine, _, clock = tiered_engine(filled(REQUEST))
    monkeypatch.setattr(FakeTier, "poll", lambda self: 1 / 0)
    engine.add(REQUEST)
    engine.step()
    clock.now_s = 2.0
    assert tokens_of([delta for _ in range(12) for delta in engine.step()]) == truth(REQUEST, 8)
    assert "the KV tier failed" in caplog.text


def test_a_tier_that_is_down_is_asked_by_an_idle_engine_only_and_gets_nothing_to_save():
    engine, tier, _ = tiered_engine(filled(REQUEST))
    tier.is_up, tier.finds, before = False, lambda count: 0, len(tier.stored)
    engine.add(Request("long", prompt(5, 200), SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)))
    for _ in range(3):
        engine.step()
    tier.loads.clear()
    engine.add(REQUEST)
    drain(engine)
    assert tier.loads == []
    assert len(tier.stored) == before
    tier.is_up, tier.finds = True, lambda count: count
    assert answer(engine, Request("b", prompt(17, 1), GREEDY))[0] == truth(REQUEST, 8)


def test_saves_hold_a_quarter_of_the_blocks_at_most():
    engine, tier, _ = tiered_engine(num_blocks=16)
    tier.save_delay = 10**9
    for i in range(3):
        engine.add(Request(f"r{i}", prompt(20, 60 * i), GREEDY))
    for _ in range(40):
        engine.step()
        engine.check()
    saving = sum(len(transfer.blocks) for _, is_load, transfer in tier.waiting if not is_load)
    assert saving == 4


def test_a_preempted_request_may_take_its_blocks_from_the_tier():
    engine, _, _ = tiered_engine(num_blocks=9, max_seq_len=36)
    requests = [Request(f"r{i}", prompt(8, 40 * i), SamplingParams(seed=i, max_tokens=20)) for i in range(3)]
    found = run_all(engine, *requests)
    assert engine.stats().total_preemptions > 0
    for request in requests:
        assert tokens_of(found[request.id]) == truth(request, len(tokens_of(found[request.id])))


def test_a_rank_that_was_restarted_owes_nothing():
    engine, tier, _ = tiered_engine(filled(REQUEST))
    tier.delay = 10**9
    engine.add(REQUEST)
    engine.step()
    engine.fail_all("gone")
    engine.reset()
    assert not engine.has_work
    assert engine.stats().num_free_blocks == 64


@settings(max_examples=60)
@given(
    num_blocks=st.integers(9, 24),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    delay=st.integers(0, 4),
    found=st.integers(0, 5),
)
def test_too_few_blocks_and_a_slow_tier_change_no_answer(num_blocks, lengths, delay, found):
    stored: dict[bytes, list[int]] = {}
    for _ in range(2):
        engine, tier, _ = tiered_engine(stored, num_blocks, max_seq_len=36, max_batch=4)
        tier.delay, tier.finds = delay, lambda count: min(count, found)
        requests = [
            Request(f"r{i}", prompt(n, i % 2), SamplingParams(seed=i, max_tokens=16)) for i, n in enumerate(lengths)
        ]
        answers = run_all(engine, *requests)
        for request in requests:
            tokens = tokens_of(answers[request.id])
            assert tokens == truth(request, len(tokens))
        assert engine.stats().num_free_blocks == num_blocks


def keys_of(request: Request) -> list[bytes]:
    """The keys of the full blocks, of 4 tokens each, of the request's prompt."""
    keys: list[bytes] = []
    extend_chain(keys, request.prompt_ids, 4, request.cache_salt)
    return keys


class TierMachine(RuleBasedStateMachine):
    """Random arrivals, steps, aborts, time and faults of the tier: every answer is a prefix of the correct one."""

    def __init__(self) -> None:
        super().__init__()
        fields = {"max_seq_len": 36, "max_batch": 3, "max_tokens_per_step": 9}
        self.engine, self.tier, self.clock = tiered_engine(None, 9, **fields)
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.vanished: set[bytes] = set()  # keys of blocks that the tier has dropped

    @rule(length=st.integers(1, 30), first=st.sampled_from([0, 50]), max_tokens=st.integers(0, 20), gives=st.booleans())
    def arrive(self, length: int, first: int, max_tokens: int, gives: bool) -> None:
        name = f"r{len(self.requests)}"
        params = SamplingParams(seed=len(self.requests), max_tokens=max_tokens)
        self.requests[name] = Request(name, prompt(length, first), params, gives_kv=gives)
        self.engine.add(self.requests[name])

    @rule(delay=st.integers(0, 5), is_up=st.booleans(), found=st.integers(0, 9))
    def change_mood(self, delay: int, is_up: bool, found: int) -> None:
        self.tier.delay, self.tier.is_up, self.tier.finds = delay, is_up, lambda count: min(count, found)

    @rule(wait_s=st.sampled_from([0.1, 2.0]))
    def pass_time(self, wait_s: float) -> None:
        self.clock.now_s += wait_s

    @rule()
    def step(self) -> None:
        for delta in self.engine.step():
            assert delta.request_id not in self.ended, "a delta after the last"
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.kv_given:
                given = keys_of(self.requests[delta.request_id])[: delta.kv_given.num_blocks]
                assert len(given) == delta.kv_given.num_blocks
                assert set(given) - self.tier.stored.keys() <= self.vanished
            if delta.finish_reason:
                self.ended.add(delta.request_id)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(sorted(self.requests))))

    @invariant()
    def answers_are_true(self) -> None:
        for name, tokens in self.tokens.items():
            assert tokens == truth(self.requests[name], len(tokens))
        self.engine.check()

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.step()
        assert self.ended == set(self.requests)
        assert self.engine.stats().num_free_blocks == 9


TestTierMachine = TierMachine.TestCase


def test_a_transfer_of_several_ranks_ends_with_the_last_and_as_far_as_all_came():
    moves = Moves(3)
    assert moves.merge([[Moved(1, 4)], [], [Moved(2, 1)]]) == []
    assert moves.merge([[Moved(2, 3)], [Moved(1, 2), Moved(2, 3)], []]) == [Moved(2, 1)]
    assert moves.merge([[], [], [Moved(1, 4)]]) == [Moved(1, 2)]
    assert moves.merge([[Moved(3, 2, 9)], [Moved(3, 2, 9)], [Moved(3, 2, 9)]]) == [Moved(3, 2, 9)]
    assert moves.merge([[Moved(4, 2, 9)], [Moved(4, 2, 9)], [Moved(4, 2, 5)]]) == [Moved(4, 2, 0)]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: TierConfig("nowhere"), "kv_tier.factory: must be module:function, got 'nowhere'"),
        (lambda: TierConfig("a:b", timeout_s=0), "kv_tier.timeout_s: must be above 0, at most 60, got 0"),
        (
            lambda: EngineConfig(backend="fake", kv_tier=TierConfig("a:b"), enable_prefix_cache=False),
            "kv_tier: needs enable_prefix_cache",
        ),
    ],
)
def test_a_tier_that_cannot_be_is_refused_by_name(make, problem):
    with pytest.raises(BadRequest) as caught:
        make()
    assert str(caught.value) == problem
