"""The class planner: the highest class first, no class starves, blocks go to the sequences that need them."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.contract.config import EngineConfig, Limits
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.engine.link.executor import InProcessExecutor
from kvloom.engine.schedule.blocks import BlockPool
from kvloom.engine.schedule.commit import apply_step, commit_step
from kvloom.engine.schedule.seq import Plan, Seq
from kvloom.gewu.qos import STARVED_AFTER_S, STARVED_EARLY_S, ClassPlanner, Level, effective_level, risen
from kvloom.rank.fake import ByteTokenizer, FakeRunner, fake_answer
from tests.support.engine.engines import fake_runner, tokens_of


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Rig:
    """An engine on the fake runner with a class planner."""

    def __init__(self, num_blocks: int = 64, max_tokens: int = 16) -> None:
        self.clock = Clock()
        self.trimmed: list[int] = []
        runner = fake_runner(num_blocks, 4, 4096)
        self.planner = ClassPlanner(self.clock, on_trim=lambda blocks, windows: self._trim(runner, blocks))
        self.plans: list[dict[int, int]] = []  # tokens of each level in each step
        config = EngineConfig(backend="fake", max_batch=8, max_tokens_per_step=max_tokens)
        self.engine = Engine(config, InProcessExecutor(runner), ByteTokenizer(), self._plan)
        self.tokens: dict[str, list[int]] = {}
        self.finished: set[str] = set()

    def _trim(self, runner: FakeRunner, blocks: list[int]) -> None:
        self.trimmed = blocks
        (layer,) = runner.kv_memory("").layers
        for block in blocks:
            for slot in range(4):
                layer[0][block, slot, 0] = 0

    def _plan(self, *arguments: Any) -> Plan:
        plan = self.planner(*arguments)
        tokens: dict[int, int] = {}
        for step in plan.steps:
            tokens[step.seq.priority] = tokens.get(step.seq.priority, 0) + step.num_tokens
        self.plans.append(tokens)
        return plan

    def add(self, name: str, level: Level, num_prompt: int = 8, max_tokens: int = 12) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        prompt = tuple((len(name) * 7 + i) % 256 for i in range(num_prompt))
        self.engine.add(Request(name, prompt, params, name, priority=int(level)))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for delta in self.engine.step():
                self.tokens.setdefault(delta.request_id, []).extend(tokens_of([delta]))
                if delta.finish_reason:
                    self.finished.add(delta.request_id)
            self.engine.check()

    def steps_to_first_token(self, name: str, num_prompt: int) -> int:
        """Steps from an interactive request's arrival to its first token."""
        self.add(name, Level.USER_INTERACTIVE, num_prompt)
        before = len(self.plans)
        while not self.num_tokens(name):
            self.step()
        return len(self.plans) - before

    def num_tokens(self, name: str) -> int:
        return len(self.tokens.get(name, []))


@pytest.mark.parametrize(
    ("of_session", "of_thread", "level"),
    [
        (None, 0, Level.DEFAULT),
        (None, 1, Level.BACKGROUND),
        (None, 6, Level.USER_INTERACTIVE),
        (None, 7, Level.DEFAULT),
        (Level.UTILITY, 6, Level.UTILITY),
    ],
)
def test_the_session_s_level_wins_over_the_thread_s(of_session, of_thread, level):
    assert effective_level(of_session, of_thread) is level


def test_a_lower_class_is_paused_and_goes_on_where_it_was():
    rig = Rig()
    rig.add("low", Level.BACKGROUND)
    rig.step(4)
    before = rig.num_tokens("low")
    rig.add("high", Level.USER_INTERACTIVE)
    while "high" not in rig.finished:
        rig.step()
    assert rig.num_tokens("low") <= before + 1  # the step after this one was already sent
    while "low" not in rig.finished:
        rig.step()
    assert rig.engine.stats().total_preemptions == 0
    params = SamplingParams(temperature=0)
    prompt = [(len("low") * 7 + i) % 256 for i in range(8)]
    assert rig.tokens["low"] == fake_answer(prompt, params, 0, 12)


def busy_rig(**sizes: int) -> Rig:
    """Four BACKGROUND requests decode, a fifth is in the middle of its long prefill."""
    rig = Rig(num_blocks=1024, **sizes)
    for i in range(4):
        rig.add("d" * (i + 1), Level.BACKGROUND, num_prompt=8, max_tokens=400)
    rig.step(6)
    rig.add("long prefill", Level.BACKGROUND, num_prompt=2000)
    rig.step(3)
    assert rig.num_tokens("dddd")
    assert not rig.num_tokens("long prefill")
    return rig


def test_background_work_costs_an_interactive_first_token_no_step():
    alone = Rig(num_blocks=1024).steps_to_first_token("question", 40)
    rig = busy_rig()
    assert rig.steps_to_first_token("question", 40) == alone
    assert [set(tokens) for tokens in rig.plans[-alone:]] == [{Level.USER_INTERACTIVE}] * alone
    assert rig.engine.stats().total_preemptions == 0


def test_a_starving_prefill_takes_no_tokens_from_an_interactive_one():
    alone = Rig(num_blocks=1024).steps_to_first_token("question", 40)
    rig = busy_rig()
    rig.clock.now_s += STARVED_EARLY_S
    assert rig.steps_to_first_token("question", 40) == alone
    *prefill, decode = [set(tokens) for tokens in rig.plans[-alone:]]
    assert prefill == [{Level.USER_INTERACTIVE}] * (alone - 1)
    assert decode == {Level.USER_INTERACTIVE, Level.BACKGROUND}  # the background prefill goes on


def test_a_starving_prefill_gets_its_step_after_ten_seconds_even_so():
    rig = busy_rig()
    rig.clock.now_s += STARVED_AFTER_S
    count = rig.steps_to_first_token("question", 40)
    assert Level.BACKGROUND in rig.plans[-count]
    assert all(Level.BACKGROUND not in tokens for tokens in rig.plans[1 - count :])


@pytest.mark.parametrize(
    ("token_s", "level", "chunk"),
    [
        (0.001, Level.BACKGROUND, 64),  # fast: a whole chunk
        (0.0048, Level.BACKGROUND, 31),  # 31 tokens take 0.15 s
        (0.0048, Level.DEFAULT, 31),
        (0.1, Level.BACKGROUND, 16),  # the minimum
        (0.1, Level.USER_INTERACTIVE, 64),  # no higher class that would wait
    ],
)
def test_chunks_of_low_classes_are_as_short_as_the_device_is_slow(token_s, level, chunk):
    rig = Rig(num_blocks=1024, max_tokens=64)
    rig.add("prefill", level, num_prompt=600)
    for _ in range(4):
        rig.step()
        rig.clock.now_s += token_s * sum(rig.plans[-1].values())
    assert rig.plans[0] == {level: 64}
    assert rig.plans[1:] == [{level: chunk}] * 3


def test_the_kv_cache_of_each_session_is_known():
    rig = Rig()
    rig.add("low", Level.BACKGROUND, num_prompt=30, max_tokens=50)
    rig.step(4)
    rig.add("high", Level.USER_INTERACTIVE, num_prompt=5, max_tokens=4)
    rig.step(2)
    assert rig.planner.held_tokens() == {"low": 32, "high": 8}  # in blocks of 4
    rig.step(200)
    assert rig.planner.held_tokens() == {}


def test_a_starving_request_gets_one_step_in_ten_seconds():
    rig = Rig()
    rig.add("low", Level.BACKGROUND, max_tokens=50)
    rig.step(3)
    rig.add("high", Level.USER_INTERACTIVE, max_tokens=200)
    rig.step(3)
    before = rig.num_tokens("low")
    rig.clock.now_s += 9.0
    rig.step(5)
    assert rig.num_tokens("low") == before
    rig.clock.now_s += 1.0
    rig.step(5)
    assert rig.num_tokens("low") == before + 1


@pytest.mark.parametrize(
    ("level", "paused_s", "now"),
    [
        (Level.BACKGROUND, 29.9, Level.BACKGROUND),
        (Level.BACKGROUND, 30, Level.UTILITY),
        (Level.BACKGROUND, 300, Level.USER_INITIATED),
        (Level.USER_INTERACTIVE, 300, Level.USER_INTERACTIVE),
    ],
)
def test_a_paused_class_rises(level, paused_s, now):
    assert risen(level, paused_s) is now


def test_a_class_served_elsewhere_holds_lower_ones_back():
    rig = Rig()
    rig.planner.floor = Level.USER_INTERACTIVE
    rig.add("low", Level.DEFAULT)
    rig.step(3)
    assert rig.num_tokens("low") == 0
    assert not rig.planner.has_steps
    assert 0 < rig.planner.wait_s() <= 1.0
    rig.planner.floor = Level.BACKGROUND
    rig.step(3)
    assert rig.num_tokens("low") > 0


def test_below_the_hard_floor_nothing_runs_however_long_it_waits():
    rig = Rig()
    rig.add("low", Level.BACKGROUND)
    rig.step(2)
    rig.planner.hard_floor = Level.UTILITY
    rig.step(2)
    before = rig.num_tokens("low")
    rig.clock.now_s += 1000
    rig.step(3)
    assert rig.num_tokens("low") == before


def test_dropping_takes_the_blocks_of_paused_requests_and_their_answer_is_the_same():
    rig = Rig()
    rig.add("low", Level.BACKGROUND)
    rig.step(3)
    rig.planner.hard_floor, rig.planner.is_dropping = Level.DEFAULT, True
    rig.step(2)
    stats = rig.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    rig.planner.hard_floor = Level.BACKGROUND
    while "low" not in rig.finished:
        rig.step()
    prompt = [(len("low") * 7 + i) % 256 for i in range(8)]
    assert rig.tokens["low"] == fake_answer(prompt, SamplingParams(temperature=0), 0, 12)


def test_trimming_forgets_what_idle_sessions_left_and_nothing_that_is_held():
    rig = Rig()
    rig.add("idle", Level.DEFAULT)
    rig.add("busy", Level.DEFAULT, max_tokens=40)
    while "idle" not in rig.finished:
        rig.step()
    assert rig.engine.stats().num_cached_blocks > rig.engine.stats().num_blocks - rig.engine.stats().num_free_blocks
    rig.planner.is_trimming = True
    rig.step()
    stats = rig.engine.stats()
    assert len(rig.trimmed) in (stats.num_free_blocks, stats.num_free_blocks + 1)  # this step may have taken a block
    assert stats.num_cached_blocks <= stats.num_blocks - stats.num_free_blocks
    while "busy" not in rig.finished:
        rig.step()
    prompt = [(len("busy") * 7 + i) % 256 for i in range(8)]
    assert rig.tokens["busy"] == fake_answer(prompt, SamplingParams(temperature=0), 0, 40)


def test_a_higher_class_takes_the_blocks_it_needs():
    rig = Rig(num_blocks=12)
    rig.add("low", Level.BACKGROUND, num_prompt=30, max_tokens=8)
    rig.step(3)
    rig.add("high", Level.USER_INTERACTIVE, num_prompt=30, max_tokens=8)
    while "high" not in rig.finished:
        rig.step()
        assert "low" not in rig.finished
    while "low" not in rig.finished:
        rig.step()


jobs = st.lists(st.tuples(st.sampled_from(list(Level)), st.integers(1, 20), st.integers(1, 10)), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(jobs, st.lists(st.floats(0, 12), max_size=20))
def test_every_request_ends_with_its_own_answer(found, pauses):
    rig = Rig(num_blocks=16)
    for i, (level, num_prompt, max_tokens) in enumerate(found):
        rig.add("x" * (i + 1), level, num_prompt, max_tokens)
        rig.clock.now_s += pauses[i] if i < len(pauses) else 0.0
        rig.step()
    for _ in range(2000):
        if not rig.engine.has_work:
            break
        rig.step()
    for i, (_, num_prompt, max_tokens) in enumerate(found):
        prompt = [((i + 1) * 7 + k) % 256 for k in range(num_prompt)]
        assert rig.tokens["x" * (i + 1)] == fake_answer(prompt, SamplingParams(temperature=0), 0, max_tokens)


def test_a_planner_that_tells_nobody_plans_all_the_same():
    pool, limits = BlockPool(8), Limits(4, 16, 4)
    planner = ClassPlanner(Clock())
    seq = Seq(0, list(range(8)), 8)
    assert [step.num_tokens for step in planner([seq], pool, limits).steps] == [8]
    assert planner.held_tokens() == {}, "the plan was not carried out"
    planner.is_trimming = True
    assert planner([], pool, limits).steps == ()
    assert not planner.is_trimming


def test_a_sequence_that_has_risen_is_still_counted_as_paused():
    """Otherwise it would fall back to its own class as soon as it runs, and wait to be raised again."""
    clock, pool, limits = Clock(), BlockPool(64), Limits(4, 16, 4)
    planner = ClassPlanner(clock)
    low, high = Seq(0, list(range(8)), 8), Seq(1, list(range(8)), 8)
    low.priority, high.priority = Level.BACKGROUND, Level.UTILITY
    served = []
    for now_s in (0.0, 9.0, 30.0, 31.0):
        clock.now_s = now_s
        plan = planner([low, high], pool, limits)
        served.append({step.seq.id for step in plan.steps})
        apply_step(plan, pool)
        commit_step(plan, {step.seq.id: [1] for step in plan.steps}, pool, 4)
    assert served == [{1}, {1}, {0, 1}, {0, 1}]
    assert planner.held_tokens() == {"": 4 * sum(len(seq.block_table) for seq in (low, high))}
    assert planner([low], pool, limits).steps[0].seq is low
