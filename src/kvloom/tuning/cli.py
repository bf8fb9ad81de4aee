"""`kvloom dataset | simulate | tune`. Options and wiring, no logic."""

import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvloom.checkpoints.demo_models import find_model
from kvloom.contract.config import MAX_GAP_S, EngineConfig
from kvloom.engine.text.tokenizer import load_tokenizer
from kvloom.server.run.engine_settings import read_engine_config
from kvloom.tuning.dataset import MAX_ROW_TOKENS, RowRules, convert, read_rows, read_texts, write_rows
from kvloom.tuning.engine_test import print_figures
from kvloom.tuning.simulate import Simulated, read_trace
from kvloom.tuning.simulate import simulate as run_simulation
from kvloom.tuning.steptime import load_times, measure, save_times
from kvloom.tuning.sweep import CONFIG, PLOT, TABLE, Aim, Tuned
from kvloom.tuning.sweep import tune as run_tuning
from kvloom.tuning.tune import Workload

console = Console()


def dataset(
    source: Annotated[Path, typer.Argument(help="A .jsonl, .csv or .parquet file, or a folder of them.")],
    output: Annotated[Path, typer.Argument(help="The CSV of token ids to write.")] = Path("token_input.csv"),
    model: Annotated[str, typer.Option(help="Whose tokenizer: a folder, a .gguf file or a fetched model.")] = "smollm2",
    field: Annotated[str, typer.Option(help="The field or column that holds the text.")] = "text",
    where: Annotated[list[str] | None, typer.Option(help="name=value that a record must have; repeatable.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longer rows are cut.")] = MAX_ROW_TOKENS,
    begin_with: Annotated[int | None, typer.Option(min=0, help="Token put before rows that lack it.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows at most.")] = None,
) -> None:
    """Turn texts into the CSV of token ids that llm_engine_test and `kvloom tune` take."""
    encode = load_tokenizer(find_model(model)).encode
    with Console(stderr=True).status("0 rows") as status:
        texts = read_texts(source, field, where or ())
        rules = RowRules(max_tokens, begin_with, limit)
        rows = convert(texts, encode, rules, lambda count: status.update(f"{count} rows"))
    write_rows(output, rows)
    console.print(f"{len(rows)} rows, {sum(map(len, rows))} tokens in {output}", highlight=False, soft_wrap=True)


def simulate(
    trace: Annotated[Path, typer.Argument(help="JSONL: arrival_s, prompt_tokens, output_tokens, priority.")],
    times: Annotated[Path, typer.Option(help="Step times of an engine; measured and written when not there.")] = Path(
        "step_times.json"
    ),
    config: Annotated[Path | None, typer.Option(help="A config.json; else the defaults and --model.")] = None,
    model: Annotated[str, typer.Option(help="What is measured without --config.")] = "smollm2",
    backend: Annotated[str, typer.Option(help="auto, cpu, reference or fake, without --config.")] = "auto",
    max_batch: Annotated[int | None, typer.Option(min=1, help="Most requests in a step.")] = None,
    max_tokens_per_step: Annotated[int | None, typer.Option(min=1, help="Most tokens of a step.")] = None,
    num_blocks: Annotated[int | None, typer.Option(min=2, help="KV blocks, instead of those measured.")] = None,
    num_host_blocks: Annotated[int | None, typer.Option(min=0, help="Blocks for what is swapped out.")] = None,
    policy: Annotated[int | None, typer.Option(help="0 FCFS, 1 STATE, 3 MLFQ.")] = None,
    max_gap_ms: Annotated[float | None, typer.Option(min=0, help="Longest step beside streams; 0 = any.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay a trace of requests against the scheduler, without a model: what a policy or a size would do."""
    arrivals = read_trace(trace)
    base = _engine_config(config, model, backend)
    if not times.exists():
        with _bar() as bar:
            task = bar.add_task("measuring step times", total=None)
            save_times(measure(base, lambda done, total: bar.update(task, completed=done, total=total)), times)
    measured = load_times(times)
    overrides: dict[str, Any] = {
        "max_batch": max_batch,
        "max_tokens_per_step": max_tokens_per_step,
        "num_blocks": num_blocks,
        "num_host_blocks": num_host_blocks,
        "prefill_policy": policy,
        "decode_policy": policy,
        "max_gap_s": None if max_gap_ms is None else max_gap_ms / 1e3,
    }
    engine = replace(base, **{name: value for name, value in overrides.items() if value is not None})
    started_s = time.perf_counter()
    with _bar() as bar:
        task = bar.add_task("requests", total=len(arrivals))
        found = run_simulation(arrivals, engine, measured, lambda done, total: bar.update(task, completed=done))
    _print_simulated(found, time.perf_counter() - started_s, as_json)


def _print_simulated(found: Simulated, wall_s: float, as_json: bool) -> None:
    more = {
        "num_steps": found.num_steps,
        "num_preempted": found.num_preempted,
        "num_swapped": found.num_swapped,
        "steps_per_wall_s": round(found.num_steps / max(wall_s, 1e-9)),
    }
    if as_json:
        sys.stdout.write(msgspec.json.encode(asdict(found.figures) | more).decode() + "\n")
        return
    print_figures(found.figures, console)
    console.print(", ".join(f"{name} {value}" for name, value in more.items()), highlight=False)


def _engine_config(config: Path | None, model: str, backend: str) -> EngineConfig:
    if config is not None:
        return read_engine_config(config)
    return EngineConfig(model="" if backend == "fake" else str(find_model(model)), backend=backend)


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


def tune(
    output: Annotated[Path, typer.Option(help="Folder for results; an interrupted run goes on there.")] = Path("tune"),
    config: Annotated[Path | None, typer.Option(help="A config.json to begin with; else --model.")] = None,
    model: Annotated[str, typer.Option(help="The model to tune without --config.")] = "smollm2",
    backend: Annotated[str, typer.Option(help="auto, cpu, reference or fake, without --config.")] = "auto",
    lpot: Annotated[float | None, typer.Option(min=0.001, help="Longest mean ms of an output token.")] = None,
    max_gap: Annotated[
        float | None, typer.Option(min=0, max=1000 * MAX_GAP_S, help="Longest ms between two tokens (maxDecodeGap).")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="CSV of token ids (kvloom dataset); else random prompts.")] = None,
    input_len: Annotated[int, typer.Option(min=1, help="Average prompt without --data.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Average answer.")] = 128,
    max_output: Annotated[int, typer.Option(min=1, help="Longest answer (maxIterTimes).")] = 512,
    most: Annotated[int | None, typer.Option(min=1, help="Largest maxBatchSize to try.")] = None,
    point_s: Annotated[float, typer.Option(min=0.1, help="Seconds that each maxBatchSize may take.")] = 30.0,
) -> None:
    """Measure machine and model, sweep maxBatchSize, and write a config.json with the reason for each value."""
    prompts = read_rows(data) if data else []
    average = sum(map(len, prompts)) / len(prompts) if prompts else float(input_len)
    aim = Aim(Workload(average, min(output_len, max_output), max_output), lpot, most, point_s, prompts, max_gap)
    with _bar() as bar:
        tasks: dict[str, Any] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what)
            bar.update(tasks[what], description=what, completed=done, total=total)

        tuned = run_tuning(_engine_config(config, model, backend), aim, output, show)
    _print_tuned(tuned, output)


def _print_tuned(tuned: Tuned, output: Path) -> None:
    shown = Table("maxBatchSize", "lpot, ms", "generate speed, tok/s", "")
    for point in sorted(tuned.points, key=lambda point: -point.max_batch):
        mark = "chosen" if point == tuned.chosen else ""
        shown.add_row(f"{point.max_batch}", f"{point.lpot_ms:.1f}", f"{point.generate_speed:.0f}", mark)
    console.print(shown)
    if not tuned.is_within_limit:
        console.print("no maxBatchSize keeps the limit; the one with the least lpot is taken")
    console.print(
        f"wrote {output / CONFIG}, {TABLE} and {PLOT}; serve it with: kvloom serve --config {output / CONFIG}",
        highlight=False,
        soft_wrap=True,
    )
