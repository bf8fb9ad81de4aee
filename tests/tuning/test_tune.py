"""The tuner's decisions on known curves, its files, and that it continues where it was stopped."""

import json
import re
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvloom.cli import app
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest
from kvloom.server.run.config_cli import starting_point
from kvloom.server.run.launch import read_engine_config
from kvloom.tuning import sweep
from kvloom.tuning.figures import figures
from kvloom.tuning.report import config_text, plot_html, table_text
from kvloom.tuning.steptime import StepTimes
from kvloom.tuning.sweep import CONFIG, PLOT, STATE, TABLE, Aim, State, tune
from kvloom.tuning.tune import Point, Proposal, Workload, choose, largest_batch, next_batch, prefill_tokens, propose

TABLE_2_10 = {200: (160, 1145), 100: (88, 1074), 90: (81, 1058), 89: (80.4, 1058), 88: (80.4, 1060), 87: (79.7, 1032)}
WORKLOAD = Workload(average_input=100, average_output=60, max_output=512)
TIMES = StepTimes(
    base_s=0.002, few_token_s=0.0005, token_s=0.0004, sample_s=0.0001, kilopair_s=0.0, model="m", num_blocks=870,
    block_size=128, max_seq_len=2048, kv_bytes=34 << 30, vocab_size=100,
)  # fmt: skip


def point(batch: int, lpot_ms: float, speed: float) -> Point:
    return Point(batch, lpot_ms, speed, 0.0, 8)


def swept(curve, most: int, limit_ms: float | None) -> list[Point]:
    """The points of a sweep over curve(batch) -> (lpot, speed)."""
    points: list[Point] = []
    while (batch := next_batch(points, most, limit_ms)) is not None:
        assert 1 <= batch <= most
        assert batch not in {p.max_batch for p in points}, "measured twice"
        points.append(point(batch, *curve(batch)))
    return points


def test_the_choice_of_the_guides_own_table():
    points = [point(batch, *values) for batch, values in TABLE_2_10.items()]
    assert choose(points, 80).max_batch == 87
    assert choose(points, 100).max_batch == 100
    assert choose(points, 10).max_batch == 87  # no batch keeps the limit: the least lpot
    assert choose(points, None).max_batch == 200  # every other batch has less than 95 % of its throughput
    assert choose([*points, point(120, 95, 1100)], None).max_batch == 120


@given(st.floats(0.5, 50), st.floats(0.01, 5), st.integers(1, 2000), st.one_of(st.none(), st.floats(1, 500)))
def test_the_choice_is_within_a_tenth_of_a_full_sweep(base_ms, each_ms, most, limit_ms):
    def curve(batch: int) -> tuple[float, float]:
        lpot_ms = base_ms + each_ms * batch
        return lpot_ms, 1000 * batch / lpot_ms

    points = swept(curve, most, limit_ms)
    assert len(points) <= 20
    full = [point(batch, *curve(batch)) for batch in range(1, most + 1)]
    feasible = [p for p in full if limit_ms is None or p.lpot_ms <= limit_ms]
    chosen = choose(points, limit_ms)
    if feasible:
        assert limit_ms is None or chosen.lpot_ms <= limit_ms
        assert chosen.generate_speed >= 0.9 * max(p.generate_speed for p in feasible)
    else:
        assert chosen.max_batch == 1


def test_a_peak_between_two_powers_of_two_is_found():
    points = swept(lambda n: (1.0, 1000 - abs(n - 48) * 10), 128, None)
    assert choose(points, None).generate_speed >= 950


def test_the_largest_batch_is_that_of_the_formulas():
    assert largest_batch(TIMES, WORKLOAD) == (174, 5)
    assert largest_batch(msgspec.structs.replace(TIMES, num_blocks=3), WORKLOAD) == (1, 5)


def test_prefill_is_best_where_its_rate_no_longer_grows():
    flat = msgspec.structs.replace(TIMES, base_s=0.0, few_token_s=TIMES.token_s, sample_s=0.0)
    assert prefill_tokens(flat) == 256
    assert prefill_tokens(msgspec.structs.replace(flat, base_s=0.1)) == 4096


def test_every_key_of_the_guide_is_proposed_with_a_reason():
    found = {p.key: p for p in propose(TIMES, WORKLOAD, 87, "why", 79.7)}
    values = {key: p.value for key, p in found.items()}
    assert values == {
        "npuMemSize": 34.0, "maxSeqLen": 2048, "cacheBlockSize": 128, "maxIterTimes": 512, "maxBatchSize": 87,
        "maxPrefillTokens": 4096, "maxPrefillBatchSize": 40, "maxPreemptCount": 10, "supportSelectBatch": True,
        "prefillTimeMsPerReq": 43, "decodeTimeMsPerReq": 1, "preAllocBlocks": 1, "worldSize": 1, "npuDeviceIds": [[0]],
    }  # fmt: skip
    assert all(p.reason for p in found.values())
    assert "870 blocks / 5 a request allow 174" in found["maxBatchSize"].reason
    small = {p.key: p.value for p in propose(TIMES, WORKLOAD, 3, "", 1e9)}
    assert (small["maxPreemptCount"], small["maxPrefillBatchSize"], small["decodeTimeMsPerReq"]) == (3, 3, 1000)


def test_a_configuration_keeps_its_comments_and_says_why():
    text = config_text(
        starting_point(), [Proposal("maxBatchSize", 87, "most throughput"), Proposal("worldSize", 1, "x")]
    )
    assert re.search(r"// tuned: most throughput\n\s*\"maxBatchSize\": 87,\n", text)
    assert len(text.splitlines()) == len(starting_point().splitlines()) + 2
    with pytest.raises(BadRequest, match="maxBatchsize"):
        config_text(starting_point(), [Proposal("maxBatchsize", 1, "")])


def test_the_table_and_the_plot_mark_the_choice():
    points = [point(batch, *values) for batch, values in TABLE_2_10.items()]
    chosen = choose(points, 80)
    table = table_text(points, chosen, [Proposal("maxBatchSize", 87, "why")])
    assert "| 87 | 79.7 | 1032 | 0 | chosen |" in table
    assert table.count("chosen") == 1
    assert "| maxBatchSize | 87 | why |" in table
    page = plot_html(points, chosen, 80, "a <b>")
    assert page.count("<circle") == len(points) + 1  # the chosen point is marked
    assert "87 (chosen)" in page
    assert "limit 80 ms" in page
    assert "a &lt;b&gt;" in page
    assert "limit" not in plot_html(points, chosen, None, "t").split("<svg")[1]
    assert "http" not in page


AIM = Aim(Workload(20, 10, 64), None, 4, 20.0)
FAKE = EngineConfig(backend="fake", max_batch=4, max_seq_len=200, num_blocks=100)


def test_an_interrupted_run_goes_on_with_what_it_has(tmp_path, monkeypatch):
    shown: list[str] = []
    real_drive = sweep.drive

    def failing(config, *args, **kwargs):
        if config.max_batch == 2:
            raise KeyboardInterrupt
        return real_drive(config, *args, **kwargs)

    monkeypatch.setattr(sweep, "drive", failing)
    with pytest.raises(KeyboardInterrupt):
        tune(FAKE, AIM, tmp_path)
    kept = msgspec.json.decode((tmp_path / STATE).read_bytes(), type=State)
    assert [p.max_batch for p in kept.points] == [1]
    monkeypatch.setattr(sweep, "drive", real_drive)
    found = tune(FAKE, AIM, tmp_path, lambda what, done, total: shown.append(what))
    assert found.points[0] == kept.points[0]
    assert {p.max_batch for p in found.points} >= {1, 2, 4}
    assert "measuring step times" not in shown
    assert "maxBatchSize 1" not in shown
    assert "maxBatchSize 4" in shown


def slow(monkeypatch, answered) -> list[tuple[int, float]]:
    """The engine answers nothing within `max_s` seconds unless `answered(max_batch, max_s)`. Returns the runs."""
    runs: list[tuple[int, float]] = []
    real_drive = sweep.drive

    def driven(config, *args, max_s, **kwargs):
        runs.append((config.max_batch, max_s))
        run = real_drive(config, *args, max_s=20.0, **kwargs)
        return run if answered(config.max_batch, max_s) else replace(run, figures=figures(run.times[:0], 1.0))

    monkeypatch.setattr(sweep, "drive", driven)
    return runs


def test_a_point_without_an_answer_is_measured_longer(tmp_path, monkeypatch):
    """It was taken for 0 ms a token, the best of all."""
    runs = slow(monkeypatch, lambda batch, max_s: max_s > 20 * batch)
    found = tune(FAKE, replace(AIM, most=2), tmp_path)
    assert runs == [(1, 20.0), (1, 80.0), (2, 20.0), (2, 80.0)]
    assert all(point.lpot_ms > 0 for point in found.points)


def test_a_batch_that_never_answers_is_left_out(tmp_path, monkeypatch):
    runs = slow(monkeypatch, lambda batch, max_s: batch < 4)
    found = tune(FAKE, replace(AIM, most=8, limit_ms=1000.0), tmp_path)
    assert [point.max_batch for point in found.points] == [1, 2]
    assert runs[-3:] == [(4, 20.0), (4, 80.0), (4, 320.0)]


def test_a_model_that_never_answers_is_one_sentence(tmp_path, monkeypatch):
    slow(monkeypatch, lambda batch, max_s: False)
    with pytest.raises(BadRequest, match="point_s: is too short: no answer came in 320 s"):
        tune(FAKE, AIM, tmp_path)


def test_the_configuration_has_the_name_that_was_asked_for(tmp_path):
    tune(FAKE, replace(AIM, name="smollm2"), tmp_path)
    assert '"modelName": "smollm2"' in (tmp_path / CONFIG).read_text()


def test_no_larger_batches_are_timed_than_are_to_be_tried(tmp_path):
    """When larger batches are to be tried, steps are timed again; earlier runs are kept."""
    timed: list[int] = []

    def show(what: str, done: int, total: int) -> None:
        if what == "measuring step times" and done == total > 1:
            timed.append(total)

    first = tune(FAKE, replace(AIM, most=1), tmp_path, show)
    again = tune(FAKE, replace(AIM, most=1), tmp_path, show)
    assert (timed, again.points) == ([2], first.points), "one batch size, two lengths of prompts"
    larger = tune(FAKE, AIM, tmp_path, show)
    assert timed == [2, 6]
    assert larger.points[0] == first.points[0]


def test_a_folder_of_another_aim_or_a_broken_one_is_refused(tmp_path):
    tune(FAKE, AIM, tmp_path)
    with pytest.raises(BadRequest, match="is of another model, configuration or data"):
        tune(FAKE, Aim(Workload(21, 10, 64), None, 4, 20.0), tmp_path)
    (tmp_path / STATE).write_text("{")
    with pytest.raises(BadRequest, match="remove it to begin again"):
        tune(FAKE, AIM, tmp_path)


def test_a_workload_that_does_not_fit_the_model_is_refused(tmp_path):
    with pytest.raises(BadRequest, match="max_output: must be below max_seq_len"):
        tune(FAKE, Aim(Workload(20, 10, 200), None, 4, 20.0), tmp_path / "a")
    with pytest.raises(BadRequest, match="input_len"):
        tune(FAKE, Aim(Workload(195, 10, 64), None, 4, 20.0), tmp_path / "b")


def test_the_command_writes_a_configuration_that_is_right(tmp_path):
    data = tmp_path / "data.csv"
    data.write_text("1,2,3\n" * 5 + "1,2,3,4,5\n" * 5)
    output = tmp_path / "out"
    command = ["tune", "--backend", "fake", "--output", str(output), "--data", str(data), "--output-len", "8"]
    result = CliRunner().invoke(app, [*command, "--most", "4", "--lpot", "0.001"])
    assert result.exit_code == 0, result.output
    assert "no maxBatchSize keeps the limit" in result.output
    engine = read_engine_config(output / CONFIG)
    assert (engine.backend, engine.max_batch, engine.max_iter_times) == ("fake", 1, 512)
    assert "no batch keeps 0.001 ms" in (output / CONFIG).read_text()
    assert (output / CONFIG).stat().st_mode & 0o007 == 0
    assert "| chosen |" in (output / TABLE).read_text()
    assert "limit 0.001 ms" in (output / PLOT).read_text()
    again = CliRunner().invoke(app, [*command, "--most", "4", "--lpot", "10000"])  # another limit reuses the points
    assert again.exit_code == 0, again.output
    points = json.loads((output / STATE).read_text())["points"]
    assert [p["max_batch"] for p in points][:3] == [1, 2, 4]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--backend", "nonsense"], "backend: must name a back end that is installed (default, auto, cpu, torch, "),
        (["--config", "c.json", "--backend", "torch"], "--backend: has no effect beside --config, which names it in c"),
        (["--config", "c.json", "--model", "smollm2"], "--model: has no effect beside --config, which names it in c"),
        (["--backend", "mock", "--model", "smollm2"], "--model: has no effect with --backend mock, which has no"),
    ],
)
@pytest.mark.parametrize("command", ["tune", "simulate"])
def test_tune_and_simulate_name_back_ends_as_serve_does_and_refuse_idle_options(tmp_path, command, options, words):
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b'{"arrival_s": 0, "prompt_tokens": 9, "output_tokens": 7}\n')
    where = ["--output", str(tmp_path / "out")] if command == "tune" else [str(trace)]
    result = CliRunner().invoke(app, [command, *where, *options])
    assert isinstance(result.exception, BadRequest)
    assert str(result.exception).startswith(words)
