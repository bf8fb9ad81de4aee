"""`kvloom tune`: measures, sweeps maxBatchSize, proposes values, writes. Measurements are kept for a later run."""

import hashlib
import os
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from kvloom.checkpoints.part_names import model_name
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest
from kvloom.reading import read_bytes
from kvloom.server.config.settings import load_settings
from kvloom.server.run.config_cli import starting_point
from kvloom.tuning.drive import drive
from kvloom.tuning.gap import propose_gap
from kvloom.tuning.report import config_text, plot_html, table_text
from kvloom.tuning.steptime import StepTimes, measure
from kvloom.tuning.tune import Point, Proposal, Workload, choose, largest_batch, next_batch, propose

_ROUNDS = 3  # a run has this many times maxBatchSize requests
_MIN_REQUESTS = 8
_LONGER = (1, 4, 16)  # times the seconds that a run may take: what gave no answer is measured longer
STATE, CONFIG, TABLE, PLOT = "state.json", "config.json", "table.md", "plot.html"

Progress = Callable[[str, int, int], object]  # name of the phase, amount done, total


class State(msgspec.Struct):
    """Measurements; `key` identifies their model, configuration and data."""

    key: str
    times: StepTimes
    points: list[Point]
    most: int | None = None  # largest batch of the timed steps; None = the configuration's

    def is_enough(self, most: int | None) -> bool:
        """Whether steps with batches as large as those to be tried have been timed."""
        return self.most is None or (most is not None and most <= self.most)


@dataclass(frozen=True, slots=True)
class Aim:
    """The aim of tuning. `prompts` are repeated if a run needs more; empty = random ones of average_input tokens."""

    workload: Workload
    limit_ms: float | None
    most: int | None  # largest maxBatchSize to try
    point_s: float  # seconds that one run may take
    prompts: Sequence[Sequence[int]] = ()
    max_gap_ms: float | None = None  # longest time between two tokens; None = the shortest that costs little
    name: str = ""  # modelName of the configuration; "" = the model's file

    @property
    def num_output(self) -> int:
        """Tokens of each answer."""
        return max(1, round(self.workload.average_output))


@dataclass(frozen=True, slots=True)
class Tuned:
    """Result of a sweep; `is_within_limit`: whether the chosen point keeps the lpot limit."""

    chosen: Point
    points: list[Point]
    proposals: list[Proposal]
    is_within_limit: bool


def tune(config: EngineConfig, aim: Aim, folder: Path, progress: Progress = lambda what, done, total: None) -> Tuned:
    """Measure, sweep and write; resumes from `folder`/state.json if that has the same model, configuration and data.

    Raises ModelError when the engine cannot start, BadRequest when the folder belongs to another aim.
    """
    folder.mkdir(parents=True, exist_ok=True)
    key = _key(config, aim)
    state = _load(folder / STATE, key)
    if state is None or not state.is_enough(aim.most):
        progress("measuring step times", 0, 1)
        times = measure(config, lambda done, total: progress("measuring step times", done, total), aim.most)
        state = State(key, times, state.points if state else [], aim.most)
        _save(state, folder / STATE)
    _check(aim.workload, state.times)
    most, _ = largest_batch(state.times, aim.workload)
    most = min(most, aim.most or most)
    while (batch := next_batch(state.points, most, aim.limit_ms)) is not None:
        point = run_point(config, aim, state.times, batch, progress)
        if point is None:  # larger ones would take longer still
            most = max((each.max_batch for each in state.points), default=0)
            if not most:
                raise BadRequest("point_s", f"is too short: no answer came in {_LONGER[-1] * aim.point_s:g} s")
            if batch < most:
                break
            continue
        state.points.append(point)
        _save(state, folder / STATE)
    tuned = _conclude(state, aim, config)
    write(tuned, aim, config, folder)
    return tuned


def _check(workload: Workload, times: StepTimes) -> None:
    """Raises BadRequest when the workload does not fit into the model's context."""
    if workload.max_output >= times.max_seq_len:
        raise BadRequest("max_output", f"must be below max_seq_len ({times.max_seq_len}), got {workload.max_output}")
    if workload.average_input + workload.average_output > times.max_seq_len:
        raise BadRequest("input_len", f"and output_len must fit in max_seq_len ({times.max_seq_len}) together")


def _conclude(state: State, aim: Aim, config: EngineConfig) -> Tuned:
    chosen = choose(state.points, aim.limit_ms)
    is_within = aim.limit_ms is None or chosen.lpot_ms <= aim.limit_ms
    if aim.limit_ms is None:
        reason = "the smallest with nearly the best throughput"
    elif is_within:
        reason = f"the most throughput with lpot {chosen.lpot_ms:.1f} ms, within {aim.limit_ms:g} ms"
    else:
        reason = f"no batch keeps {aim.limit_ms:g} ms; this one has the least lpot, {chosen.lpot_ms:.1f} ms"
    proposals = propose(state.times, aim.workload, chosen.max_batch, reason, chosen.lpot_ms)
    tried = _tried(config, aim, state.times, chosen.max_batch)
    proposals.append(propose_gap(state.times, aim.workload, tried, aim.max_gap_ms))
    return Tuned(chosen, state.points, proposals, is_within)


def run_point(config: EngineConfig, aim: Aim, times: StepTimes, batch: int, progress: Progress) -> Point | None:
    """Measure one point of the sweep, with all settings that depend on maxBatchSize; longer where no answer came in
    its time, and None where none came then either.
    """
    num_requests = max(_MIN_REQUESTS, _ROUNDS * batch)
    what = f"maxBatchSize {batch}"
    for longer in _LONGER:
        found = drive(
            _tried(config, aim, times, batch),
            _prompts(aim, times, num_requests),
            max_output=aim.num_output,
            progress=lambda done, tokens: progress(what, done, num_requests),
            max_s=longer * aim.point_s,
        ).figures
        first, lpot = found.first_token_ms, found.lpot_ms
        if first is not None and (aim.num_output == 1 or (lpot is not None and lpot.most > 0)):
            lpot_ms = lpot.mean if lpot is not None else 0.0  # of answers of one token: none follows
            return Point(batch, lpot_ms, found.generate_speed, first.mean, found.num_requests)
    return None


def _tried(config: EngineConfig, aim: Aim, times: StepTimes, batch: int) -> EngineConfig:
    proposals = {p.key: p.value for p in propose(times, aim.workload, batch, "", 1.0)}
    return replace(
        config,
        max_batch=batch,
        max_tokens_per_step=batch + proposals["maxPrefillTokens"],
        max_prefill_batch=proposals["maxPrefillBatchSize"],
        max_prefill_tokens=proposals["maxPrefillTokens"],
        max_preempt=proposals["maxPreemptCount"],
        max_iter_times=aim.workload.max_output,
    )


def _prompts(aim: Aim, times: StepTimes, count: int) -> list[Sequence[int]]:
    if aim.prompts:
        return [aim.prompts[i % len(aim.prompts)] for i in range(count)]
    draw, length = random.Random(count), max(1, round(aim.workload.average_input))
    return [[draw.randrange(times.vocab_size) for _ in range(length)] for _ in range(count)]


def write(tuned: Tuned, aim: Aim, config: EngineConfig, folder: Path) -> None:
    """Write config.json, the table and the plot; the configuration is read back as a check."""
    own = model_name(Path(config.model)) if config.model else ""
    allowed = re.sub(r"[^A-Za-z0-9_.:-]", "-", own).lstrip(".:-")  # characters that modelName allows
    name = aim.name or allowed or "mock"
    model = [
        Proposal("modelName", name, "as asked for" if aim.name else "the model's file"),
        Proposal("modelInstanceType", "Standard" if config.model else "StandardMock", "as measured"),
        Proposal("modelWeightPath", str(Path(config.model).resolve()) if config.model else "", "as measured"),
    ]
    path = folder / CONFIG
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640), "w", encoding="utf-8") as out:
        out.write(config_text(starting_point(), [*tuned.proposals, *model]))
    load_settings(path)
    (folder / TABLE).write_text(table_text(tuned.points, tuned.chosen, tuned.proposals))
    title = f"{name}: throughput against latency"
    (folder / PLOT).write_text(plot_html(tuned.points, tuned.chosen, aim.limit_ms, title))


def _key(config: EngineConfig, aim: Aim) -> str:
    """A key that depends on everything that affects a measured point, but not on the limit, which may be changed."""
    parts = (config, aim.workload, aim.point_s, [list(prompt) for prompt in aim.prompts])
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def _load(path: Path, key: str) -> State | None:
    if not path.exists():
        return None
    try:
        state = msgspec.json.decode(read_bytes(path), type=State)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest(str(path), f"cannot be read: {error}; remove it to begin again") from None
    if state.key != key:
        raise BadRequest(str(path), "is of another model, configuration or data; give another --output or remove it")
    return state


def _save(state: State, path: Path) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(state)))
    part.replace(path)
