"""A simulated fleet: one replica gives the engine's simulation; of many, every request ends once, whatever fails."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvloom.cli import app
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest
from kvloom.tuning.fleet.routing import ROUTINGS, Ask, PowerOfTwo, Prefix
from kvloom.tuning.fleet.simulate import Failure, FleetSimulated, Shape, simulate_fleet
from kvloom.tuning.fleet.sizing import Point, Slo, fewest, plot_html, point_of
from kvloom.tuning.simulate import simulate
from kvloom.tuning.steptime import StepTimes, save_times
from kvloom.tuning.trace import MOONCAKE_BLOCK, Arrival, job_of, read_trace

PARTS = {"base_s": 0.004, "few_token_s": 0.001, "token_s": 0.001, "sample_s": 0.0, "kilopair_s": 0.0}
TIMES = StepTimes(**PARTS, model="fake", num_blocks=200, block_size=4, max_seq_len=64, kv_bytes=200 << 20)
CONFIG = EngineConfig(backend="fake", max_batch=4, max_tokens_per_step=16)
ARRIVALS = st.lists(
    st.builds(
        Arrival,
        st.sampled_from([0.0, 0.1, 0.15, 3.0]),
        st.integers(1, 40),
        st.integers(1, 20),
        hash_ids=st.sampled_from([(), (1,), (2,)]),
    ),
    min_size=1,
    max_size=12,
)
EACH = pytest.mark.parametrize("routing", ROUTINGS)


@EACH
@settings(max_examples=25, deadline=None)
@given(trace=ARRIVALS)
def test_a_fleet_of_one_is_an_engine(routing: str, trace: list[Arrival]):
    alone, found = simulate(trace, CONFIG, TIMES), simulate_fleet(trace, CONFIG, TIMES, Shape(1, routing))
    assert found.figures == alone.figures
    assert [run.gaps_s for run in found.times] == [run.gaps_s for run in alone.times]
    assert found.num_steps == alone.num_steps


@settings(max_examples=80, deadline=None)
@given(
    trace=ARRIVALS,
    routing=st.sampled_from(sorted(ROUTINGS)),
    num_replicas=st.integers(1, 4),
    num_prefill=st.integers(0, 2),
    failures=st.lists(
        st.builds(
            Failure, st.sampled_from([0.0, 0.02, 0.1, 0.12]), st.integers(0, 5), st.sampled_from([0.0, 0.05, 9.0])
        ),
        max_size=4,
    ),
)
def test_every_request_ends_once_with_all_its_tokens_or_an_error(
    trace: list[Arrival], routing: str, num_replicas: int, num_prefill: int, failures: list[Failure]
):
    known = tuple(Failure(each.at_s, each.replica % num_replicas, each.down_s) for each in failures)
    shape = Shape(num_replicas, routing, num_prefill, 8, 1e9, known)
    found = simulate_fleet(trace, CONFIG, TIMES, shape)
    for run, arrival in zip(found.times, trace, strict=True):
        assert run.ended_s is not None
        assert run.ended_s >= arrival.arrival_s
        assert run.num_output == arrival.output_tokens or run.error == "it was moved too often"
        assert run.num_output <= arrival.output_tokens
        assert sum(run.gaps_s, run.first_token_s or 0.0) == pytest.approx(
            run.last_s - run.started_s if run.num_output else 0
        )
    if not failures:
        assert found.figures.num_failed == found.num_moves == 0


def shared(num: int, every_s: float = 0.2) -> list[Arrival]:
    """Requests of 8 conversations in turn, each with its own prefix."""
    return [Arrival(i * every_s, 40, 4, hash_ids=(i * 5 % 8,)) for i in range(num)]


def run(routing: str, num: int, **shape: object) -> FleetSimulated:
    return simulate_fleet(shared(num), CONFIG, TIMES, Shape(**{"num_replicas": 4, "routing": routing, **shape}))


def test_who_routes_by_prefix_finds_more_and_answers_sooner():
    by_prefix, by_load = run("prefix", 80), run("power_of_two", 80)
    assert by_prefix.hit_rate > 0.8 > 0.7 > by_load.hit_rate
    assert by_prefix.figures.first_token_ms.mean < by_load.figures.first_token_ms.mean


def test_a_lost_replica_loses_its_cache_and_its_requests_go_on_elsewhere():
    found = run("round_robin", 40, num_replicas=2, failures=(Failure(0.01, 0, 2.0),))
    assert (found.num_moves, found.figures.num_failed) == (1, 0)
    assert found.times[0].num_output == 4
    assert found.times[0].first_token_s > simulate_fleet(shared(40), CONFIG, TIMES, Shape(2)).times[0].first_token_s


def test_requests_wait_for_a_replica_when_none_is_up():
    found = run("prefix", 3, num_replicas=1, failures=(Failure(0.3, 0, 5.0),))
    assert found.times[2].first_token_s > 4.8
    assert found.figures.num_failed == 0


def test_long_prompts_are_computed_apart_and_their_blocks_cost_the_way():
    trace = [Arrival(0.0, 40, 6), Arrival(0.0, 8, 6)]
    slow, fast = (simulate_fleet(trace, CONFIG, TIMES, Shape(1, "prefix", 1, 30, speed)) for speed in (1e7, 1e12))
    assert [run.num_output for run in fast.times] == [6, 6]
    assert fast.times[0].first_token_s == slow.times[0].first_token_s == pytest.approx(3 * 0.004 + 40 * 0.001)
    assert slow.times[0].gaps_s[0] - fast.times[0].gaps_s[0] == pytest.approx(10 * 1.048576 / 10, rel=0.05)
    assert fast.hit_rate > 0.4  # all of the prompt but its end was cached


def test_routing_by_prefix_weighs_what_is_held_against_what_waits():
    routing, hashes = Prefix({"a": 100, "b": 100}, 4), [bytes([i]) * 32 for i in range(8)]
    first = routing.route(Ask(1, hashes, 33), ["a", "b"])
    assert routing.route(Ask(2, hashes, 33), ["a", "b"]) != first  # waiting would take longer than computing
    for id in (1, 2):
        routing.begun(id)
        routing.ended(id)
    longer = [*hashes, *(bytes([i]) * 32 for i in range(50, 60))]
    second = routing.route(Ask(3, longer, 73), ["a", "b"])
    routing.ended(3)
    assert routing.route(Ask(4, longer, 73), ["a", "b"]) == second


def test_power_of_two_takes_the_less_loaded():
    routing = PowerOfTwo()
    assert sorted(routing.route(Ask(i, [], 10), ["a", "b"]) for i in range(6)) == ["a"] * 3 + ["b"] * 3


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_trace_of_mooncake_shares_what_its_hash_ids_share(tmp_path):
    lines = [
        {"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]},
        {"timestamp": 30535, "input_length": 1000, "output_length": 2, "hash_ids": [46, 50]},
    ]
    first, second = read_trace(write(tmp_path / "t.jsonl", "\n".join(map(json.dumps, lines))))
    assert (first.arrival_s, first.prompt_tokens, second.output_tokens) == (27.482, 600, 2)
    one, two = job_of(0, first), job_of(1, second)
    assert (len(one.tokens), len(two.tokens), one.salt) == (600, 1000, two.salt)
    assert one.tokens[:MOONCAKE_BLOCK] == two.tokens[:MOONCAKE_BLOCK]
    assert set(one.tokens[MOONCAKE_BLOCK:]).isdisjoint(two.tokens)


HEAD = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def test_a_trace_of_burstgpt_leaves_out_what_failed(tmp_path):
    rows = "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,30,0,30,API log\n118.5,GPT-4,1087,230,1317,API log\n"
    found = read_trace(write(tmp_path / "t.csv", HEAD + rows))
    assert [(a.arrival_s, a.prompt_tokens, a.output_tokens) for a in found] == [(5.0, 472, 18), (118.5, 1087, 230)]
    assert len(read_trace(tmp_path / "t.csv", limit=1)) == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (" ", "t: holds no request"),
        ("a,b\n1,2\n", "line 1: is neither JSON nor a header with the column 'Timestamp'"),
        (HEAD, "t: holds no request"),
        (HEAD + "1,m,2,0,2,l\n", "t: holds no request"),
        (HEAD + "1,m,2,3,5,l\nx,m,2,3,5,l\n", "line 3: Expected `float`, got `str` - at `$.Timestamp`"),
        (HEAD + "1,m\n", "line 2: Expected `int`, got `null`"),
        (
            '{"timestamp": 1, "input_length": 0, "output_length": 1}',
            "line 1: Expected `int` >= 1 - at `$.input_length`",
        ),
        ('{"timestamp": 1, "input_length": 1}', "line 1: Object missing required field `output_length`"),
        ('\n{"timestamp": "x"}', "line 2: Expected `float`, got `str`"),
        ('{"arrival_s": 1, "prompt_tokens": 99999999, "output_tokens": 1}', "line 1: Expected `int` <= 16777216"),
        ("[" * 100_000, "line 1: "),
    ],
)
def test_a_trace_that_cannot_be_read_is_told_by_file_and_line(tmp_path, text: str, problem: str):
    with pytest.raises(BadRequest) as told:
        read_trace(write(tmp_path / "t", text))
    assert problem in str(told.value)


def point(num: int, is_within: bool) -> Point:
    return Point("prefix", num, 10.0 / num, 1.0, 0.5, 0, 100.0, is_within)


@given(needed=st.integers(1, 70), most=st.integers(1, 64))
def test_the_fewest_replicas_are_found(needed: int, most: int):
    found, points = fewest(lambda count: point(count, count >= needed), most)
    assert found == (needed if needed <= most else None)
    assert [p.num_replicas for p in points] == sorted({p.num_replicas for p in points})
    assert len(points) <= 14


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Slo(ttft_ms=0), "slo_ttft_ms: must be above 0, got 0"),
        (lambda: Slo(tpot_ms=float("nan")), "slo_tpot_ms: must be above 0, got nan"),
        (lambda: Slo(percent=101), "slo_percentile: must be above 0, at most 100, got 101"),
        (lambda: Shape(0), "replicas: must be at least 1, got 0"),
        (lambda: Shape(2, failures=(Failure(1, 2, 1),)), "fail: must name one of the replicas 0 to 1, got 2"),
        (lambda: Shape(1, "best"), "routing: must be one of prefix, power_of_two, round_robin, got 'best'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make: Callable[[], object], problem: str):
    with pytest.raises(BadRequest, match=problem):
        make()


def test_replicas_that_answered_nothing_have_no_times():
    found = simulate_fleet([Arrival(0.0, 8, 1)], CONFIG, TIMES, Shape(1))
    one_token = point_of("prefix", 1, found, Slo(tpot_ms=1))
    assert (one_token.tpot_ms, one_token.is_within, one_token.row()["TPOT, ms"]) == (None, True, "-")
    assert plot_html([one_token], Slo(), {"prefix": 1}, "Replicas").count("<svg") == 1


def test_the_picture_has_lines_limits_and_a_table():
    page = plot_html([point(1, False), point(2, True)], Slo(ttft_ms=7), {"prefix": 2}, "Replicas")
    assert page.count("<svg") == 2
    assert "limit 7 ms" in page
    assert "<td>yes</td>" in page


@pytest.fixture
def files(tmp_path) -> list[str]:
    lines = [json.dumps({"arrival_s": i * 0.02, "prompt_tokens": 40, "output_tokens": 8}) for i in range(30)]
    save_times(TIMES, tmp_path / "times.json")
    write(tmp_path / "t.jsonl", "\n".join(lines))
    return ["simulate", str(tmp_path / "t.jsonl"), "--times", str(tmp_path / "times.json"), "--backend", "fake"]


def test_the_command_line_says_how_many_replicas_an_slo_needs(files, tmp_path):
    plot = tmp_path / "plot.html"
    more = ["--fleet", "--slo-ttft-ms", "120", "--routing", "prefix", "--routing", "round_robin", "--plot", str(plot)]
    done = CliRunner().invoke(app, [*files, *more, "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["needed"].keys() == {"prefix", "round_robin"}
    for routing, count in told["needed"].items():
        within = {p["num_replicas"]: p["is_within"] for p in told["points"] if p["routing"] == routing}
        assert (within[count], within[count - 1]) == (True, False)
    assert "replicas" in plot.read_text()
    done = CliRunner().invoke(app, [*files, "--fleet", "--slo-ttft-ms", "1", "--max-replicas", "3"])
    assert "prefix: no number up to 3 keeps the SLO" in done.stdout
    done = CliRunner().invoke(app, [*files, "--fleet", "--replicas", "2", "--fail", "0.1:1:0.2", "--prefill", "1"])
    assert done.exit_code == 0, done.output
    assert "within" not in done.stdout  # because there is no SLO
    done = CliRunner().invoke(app, [*files, "--fleet", "--slo-ttft-ms", "500", "--fail", "0.1:2:0.2", "--json"])
    assert [each["num_replicas"] for each in json.loads(done.stdout)["points"]] == [3]  # --fail names the third replica


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--fleet"], "replicas: or a limit (slo_ttft_ms, slo_tpot_ms) is required with --fleet"),
        (["--replicas", "2"], "fleet: is needed by the options of a fleet: give --fleet"),
        (["--fleet", "--replicas", "2", "--routing", "x"], "routing: must be one of prefix, power_of_two, round_robin"),
        (
            ["--fleet", "--replicas", "2", "--fail", "1:2"],
            "fail: is SECOND:REPLICA:DOWN_SECONDS, as 30:0:20, got '1:2'",
        ),
        (["--fleet", "--replicas", "2", "--fail", "-1:0:1"], "fail: is SECOND:REPLICA:DOWN_SECONDS, none below 0"),
        (["--fleet", "--slo-ttft-ms", "-1"], "slo_ttft_ms: must be above 0, got -1"),
        (["--fleet", "--replicas", "2", "--fail", "1:9:3"], "fail: must name one of the replicas 0 to 1, got 9"),
        (
            ["--fleet", "--slo-ttft-ms", "1", "--max-replicas", "4", "--fail", "1:4:3"],
            "fail: must name one of the replicas 0 to 3, got 4",
        ),
    ],
)
def test_the_command_line_refuses_by_name(files, more: list[str], problem: str):
    with pytest.raises(BadRequest) as told:
        CliRunner().invoke(app, [*files, *more], catch_exceptions=False)
    assert str(told.value).startswith(problem)


@pytest.mark.parametrize("more", [[], ["--fleet", "--replicas", "2"]])
def test_prompts_beyond_the_context_are_left_out_and_told(files, more: list[str]):
    trace = Path(files[1])
    line = json.dumps({"arrival_s": 0, "prompt_tokens": 64, "output_tokens": 2})
    trace.write_text(trace.read_text() + "\n" + line)
    done = CliRunner().invoke(app, [*files, *more])
    assert done.exit_code == 0, done.output
    assert "1 of 31 requests have prompts of 64 tokens and more" in " ".join(done.stderr.split())
    trace.write_text(line)
    with pytest.raises(BadRequest, match="trace: 1 of 1 requests have prompts of 64 tokens and more"):
        CliRunner().invoke(app, [*files, *more], catch_exceptions=False)


def test_a_trace_that_is_not_there_is_told_before_other_mistakes(files):
    with pytest.raises(BadRequest, match=r"gone\.jsonl: cannot be read"):
        CliRunner().invoke(app, ["simulate", "gone.jsonl", *files[2:], "--fleet"], catch_exceptions=False)
