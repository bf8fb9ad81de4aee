"""The simulator behaves as the engine does, and the fit recovers its step times."""

import json
import random
from collections import deque
from dataclasses import replace

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvloom.cli import app
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest
from kvloom.contract.messages import Batch, StepOutput
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.engine.link.executor import InProcessExecutor, max_submitted
from kvloom.engine.schedule.cost import Load
from kvloom.rank.fake import ByteTokenizer, FakeRunner
from kvloom.tuning.simulate import simulate
from kvloom.tuning.steptime import StepTimes, fit, load_times, measure, save_times
from kvloom.tuning.trace import Arrival, read_trace

STEP_S, TOKEN_S = 0.004, 0.001
BLOCK = 4


def make_times(num_blocks: int = 200, **fields) -> StepTimes:
    parts = {"base_s": STEP_S, "few_token_s": TOKEN_S, "token_s": TOKEN_S, "sample_s": 0.0, "kilopair_s": 0.0}
    return StepTimes(**parts | fields, model="fake", num_blocks=num_blocks, block_size=BLOCK, max_seq_len=64)


class LateExecutor(InProcessExecutor):
    """Behaves as a rank process: it runs a batch, submitted in advance, once the batch before has ended."""

    def __init__(self, runner: FakeRunner, max_submitted: int) -> None:
        super().__init__(runner, max_submitted)
        self._batches: deque[Batch] = deque()

    def submit(self, batch: Batch) -> None:
        assert len(self._batches) < self.max_submitted
        self._batches.append(batch)

    def collect(self) -> StepOutput:
        super().submit(self._batches.popleft())
        return super().collect()


class EngineAtItsOwnTime:
    """A real engine over the fake model whose clock is the sum of its steps."""

    def __init__(self, trace: list[Arrival], num_blocks: int, config: EngineConfig) -> None:
        self.now_s = 0.0
        sizes = {"num_blocks": num_blocks, "block_size": BLOCK, "max_seq_len": 64}
        times = {"fake_step_s": STEP_S, "fake_token_s": TOKEN_S}
        runner = FakeRunner(EngineConfig(backend="fake", **sizes, **times), self.pass_time)
        self.engine = Engine(
            config, LateExecutor(runner, max_submitted(config)), ByteTokenizer(), clock=lambda: self.now_s
        )
        self.trace, self.ended_s = trace, {}

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    def run(self) -> dict[str, float]:
        coming = sorted(enumerate(self.trace), key=lambda item: item[1].arrival_s)
        while coming or self.engine.has_work:
            if not self.engine.has_work:
                self.now_s = max(self.now_s, coming[0][1].arrival_s)
            while coming and coming[0][1].arrival_s <= self.now_s:
                self.add(*coming.pop(0))
            deltas = self.engine.step()
            deltas += self.engine.take_deltas()
            self.ended_s |= {d.request_id: self.now_s for d in deltas if d.finish_reason}
        return self.ended_s

    def add(self, index: int, arrival: Arrival) -> None:
        params = SamplingParams(temperature=0, max_tokens=arrival.output_tokens, ignore_eos=True)
        prompt = (index,) * arrival.prompt_tokens
        request = Request(
            str(index), prompt, params, priority=arrival.priority, tenant=arrival.tenant, cache_salt=str(index)
        )
        self.engine.add(request)


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        st.sampled_from([0.0, 0.1, 0.5, 3.0]),
        st.integers(1, 30),
        st.integers(1, 20),
        st.integers(0, 5),
        tenant=st.sampled_from(["", "a"]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=80, deadline=None)
@given(
    ARRIVALS,
    st.integers(16, 60),
    st.fixed_dictionaries(
        {
            "prefill_policy": st.sampled_from([0, 1, 3]),
            "is_continuous": st.booleans(),
            "fair_token_s": st.sampled_from([0.0, 0.01]),
            "run_ahead": st.booleans(),
        }
    ),
)
@example(  # a sequence that was preempted begins again with a part of a block that it left
    [Arrival(0.0, 3, 4), Arrival(0.0, 27, 4), Arrival(0.0, 28, 13)],
    16,
    {"prefill_policy": 0, "is_continuous": True, "fair_token_s": 0.0, "run_ahead": False},
)
def test_every_request_ends_when_it_does_in_the_engine(trace, num_blocks, options):
    policy = options["prefill_policy"]
    sizes = {"max_batch": 4, "max_tokens_per_step": 16, "num_speculative_tokens": 0}  # a simulation knows no tokens
    config = EngineConfig(backend="fake", decode_policy=policy, **sizes, **options)
    real = EngineAtItsOwnTime(trace, num_blocks, config)
    ended_s = real.run()
    found = simulate(trace, config, make_times(num_blocks))
    assert [run.ended_s for run in found.times] == pytest.approx([ended_s[str(i)] for i in range(len(trace))])
    stats = real.engine.stats()
    assert (found.num_steps, found.num_preempted) == (stats.total_steps, stats.total_preemptions)
    assert [run.num_output for run in found.times] == [a.output_tokens for a in trace]


def test_prompts_beside_streams_are_held_back_as_in_the_engine():
    trace = [Arrival(0.0, 2, 40), *(Arrival(0.05, 50, 3) for _ in range(6))]
    config = EngineConfig(backend="fake", max_batch=8, max_tokens_per_step=400, max_gap_s=0.01)
    real = EngineAtItsOwnTime(trace, 200, config)
    ended_s = real.run()
    found = simulate(trace, config, make_times())
    assert [run.ended_s for run in found.times] == pytest.approx([ended_s[str(i)] for i in range(len(trace))])
    free = simulate(trace, replace(config, max_gap_s=0.0), make_times())
    assert max(found.times[0].gaps_s) < max(free.times[0].gaps_s)


def test_swapping_costs_its_copies():
    trace = [Arrival(0.0, 20, 20) for _ in range(4)]
    config = EngineConfig(backend="fake", max_batch=4, num_host_blocks=100)
    times = make_times(num_blocks=24, swap_block_s=0.0)
    free = simulate(trace, config, times)
    assert free.num_swapped == free.num_preempted > 0
    dear = simulate(trace, config, msgspec.structs.replace(times, swap_block_s=0.001))
    assert dear.figures.elapsed_s > free.figures.elapsed_s
    never = simulate(trace, config, msgspec.structs.replace(times, swap_block_s=10.0))
    assert never.num_swapped == 0


def test_a_request_that_can_never_run_is_named():
    with pytest.raises(BadRequest, match="request 2: prompt_tokens must be below 64, got 64"):
        simulate([Arrival(0, 63, 1), Arrival(0, 64, 1)], EngineConfig(backend="fake"), make_times())


@given(st.lists(st.floats(1e-5, 1e-2), min_size=5, max_size=5), st.integers(0, 1000))
def test_the_fit_finds_the_parts_that_made_the_times(parts, seed):
    draw = random.Random(seed)
    times = make_times(base_s=parts[0], few_token_s=parts[1], token_s=parts[2], sample_s=parts[3], kilopair_s=parts[4])
    loads = [Load(draw.randrange(1, 500), draw.randrange(1, 64), draw.randrange(1, 10**6)) for _ in range(60)] + [
        Load(n, 1, n * n) for n in range(1, 12)
    ]
    found = fit(loads, [times.step_s(load) for load in loads])
    assert found == pytest.approx(parts, rel=1e-3, abs=1e-7)


def test_no_part_is_negative_and_a_disturbed_step_does_not_count():
    draw = random.Random(1)
    loads = [Load(n, 1, n) for n in range(1, 40)]
    noisy = fit(loads, [0.01 * draw.uniform(0.9, 1.1) for _ in loads])
    assert min(noisy) >= 0
    steady = [0.002 + 0.001 * load.num_tokens for load in loads]
    steady[20] *= 50
    found = make_times(
        **dict(zip(("base_s", "few_token_s", "token_s", "sample_s", "kilopair_s"), fit(loads, steady), strict=True))
    )
    assert found.step_s(loads[30]) == pytest.approx(steady[30], rel=0.01)


def test_a_trace_is_read_with_its_defaults(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [{"arrival_s": 0.5, "prompt_tokens": 3, "output_tokens": 2, "priority": 1}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n" + '{"arrival_s":0,"prompt_tokens":1,"output_tokens":1}')
    assert read_trace(path) == [Arrival(0.5, 3, 2, 1), Arrival(0.0, 1, 1)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"arrival_s":0,"prompt_tokens":0,"output_tokens":1}', r"line 1: .*\$.prompt_tokens"),
        ('{"arrival_s":0,"prompt_tokens":1,"output_tokens":1,"priority":6}', r"\$.priority"),
        ('{"arrival_s":0,"prompt_tokens":1}', "output_tokens"),
        ('{"arrival_s":0,"prompt_tokens":1,"output_tokens":1,"x":1}', "x"),
        ("\n", "holds no request"),
    ],
)
def test_a_bad_trace_is_named_by_line_and_field(tmp_path, text, says):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(BadRequest, match=says):
        read_trace(path)
    with pytest.raises(BadRequest, match="cannot be read"):
        read_trace(tmp_path / "none")


def test_measuring_the_mock_gives_times_that_can_be_kept(tmp_path):
    calls: list[tuple[int, int]] = []
    config = EngineConfig(backend="fake", max_batch=4, max_seq_len=200, block_size=BLOCK)
    times = measure(config, lambda done, total: calls.append((done, total)))
    assert calls[-1] == (6, 6)
    assert times.step_s(Load(4, 4, 400)) > 0
    assert (times.block_size, times.max_seq_len, times.model) == (BLOCK, 200, "")
    save_times(times, tmp_path / "times.json")
    assert load_times(tmp_path / "times.json") == times
    (tmp_path / "times.json").write_text("{}")
    with pytest.raises(BadRequest, match=r"times.json: cannot be read as step times"):
        load_times(tmp_path / "times.json")


def test_the_command_measures_once_and_prints_figures(tmp_path):
    trace, times = tmp_path / "trace.jsonl", tmp_path / "times.json"
    trace.write_bytes(b"\n".join(msgspec.json.encode(Arrival(i / 10, 9, 7)) for i in range(20)))
    command = ["simulate", str(trace), "--times", str(times), "--backend", "fake", "--max-batch", "2", "--policy", "3"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert "generate speed" in shown.output
    save_times(make_times(), times)  # existing step times are not measured again
    result = CliRunner().invoke(app, [*command, "--json"])
    found = json.loads(result.stdout.splitlines()[-1])
    assert (found["num_requests"], found["average_output_length"]) == (20, 7)
    assert found["num_steps"] > 20
    assert found["lpot_ms"]["p50"] == pytest.approx(1000 * (STEP_S + TOKEN_S))  # each runs alone
