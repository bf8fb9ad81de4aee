"""`kvloom dataset | simulate | tune`. Options and wiring, no logic."""

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvloom.checkpoints.demo_models import MODELS, find_model
from kvloom.commands import finite
from kvloom.contract.config import MAX_GAP_S, EngineConfig
from kvloom.contract.errors import BadRequest
from kvloom.engine.text.tokenizer import load_tokenizer
from kvloom.server.config.backends import named_backend
from kvloom.server.run.launch import DEMO_MODEL, read_model_card
from kvloom.tuning.dataset import MAX_ROW_TOKENS, RowRules, convert, read_rows, read_texts, write_rows
from kvloom.tuning.engine_test import print_figures
from kvloom.tuning.fleet.cli import FleetOptions, run_fleet
from kvloom.tuning.machine import Machine
from kvloom.tuning.simulate import Simulated
from kvloom.tuning.simulate import simulate as run_simulation
from kvloom.tuning.steptime import load_times, measure, save_times
from kvloom.tuning.sweep import CONFIG, PLOT, TABLE, Aim, Tuned
from kvloom.tuning.sweep import tune as run_tuning
from kvloom.tuning.trace import read_trace, servable
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


# The options of `kvloom simulate`.
MAX_BLOCKS = 10_000_000  # most simulated blocks, each of which takes 100 bytes of bookkeeping
MAX_REPLICAS = 10_000
_MEASURED = "Step times of an engine; measured and written when not there."

Times = Annotated[Path, typer.Option(help=_MEASURED)]
Config = Annotated[Path | None, typer.Option(help="A config.json; else the defaults and --model.")]
Model = Annotated[str | None, typer.Option(help="What is measured without --config; smollm2 unless given.")]
Backend = Annotated[str | None, typer.Option(help="auto, cpu, torch or mock, without --config.")]
MaxBatch = Annotated[int | None, typer.Option(min=1, help="Most requests in a step.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Most tokens of a step.")]
NumBlocks = Annotated[int | None, typer.Option(min=2, max=MAX_BLOCKS, help="KV blocks, instead of those measured.")]
NumHostBlocks = Annotated[int | None, typer.Option(min=0, max=MAX_BLOCKS, help="Blocks for what is swapped out.")]
Policy = Annotated[int | None, typer.Option(help="0 FCFS, 1 STATE, 3 MLFQ.")]
MaxGap = Annotated[float | None, typer.Option(min=0, callback=finite, help="Longest step beside streams; 0 = any.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only so many requests, from the first line on.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

Fleet = Annotated[bool, typer.Option("--fleet", help="Many replicas; the options below are of it.")]
Replicas = Annotated[int | None, typer.Option(min=1, max=MAX_REPLICAS, help="So many; else as few as keep the SLO.")]
MaxReplicas = Annotated[int, typer.Option(min=1, max=MAX_REPLICAS, help="Most that are tried for the SLO.")]
RoutingNames = Annotated[
    list[str] | None,
    typer.Option("--routing", help="prefix (as a fleet routes), power_of_two, round_robin; repeatable."),
]
Prefill = Annotated[int, typer.Option(min=0, max=MAX_REPLICAS, help="More replicas, that only compute long prompts.")]
PrefillFrom = Annotated[int, typer.Option(min=1, help="Tokens from which on a prompt is long.")]
PoolSpeed = Annotated[
    float,
    typer.Option("--pool-gb-s", min=0.001, callback=finite, help="GB a second out of the pool, for such prompts."),
]
Failures = Annotated[
    list[str] | None,
    typer.Option(
        "--fail", help="A replica that is lost: from when, which, for how many seconds, as 30:0:20; repeatable."
    ),
]
SloTtft = Annotated[float | None, typer.Option(help="Longest time to the first token.")]
SloTpot = Annotated[float | None, typer.Option(help="Longest mean time of a further token.")]
SloPercentile = Annotated[float, typer.Option(help="Of the requests, that are to keep it.")]
Plot = Annotated[Path | None, typer.Option(help="An HTML page with the picture.")]


def simulate(
    trace: Annotated[Path, typer.Argument(help="Requests: this project's or Mooncake's JSONL, or BurstGPT's CSV.")],
    times: Times = Path("step_times.json"),
    config: Config = None,
    model: Model = None,
    backend: Backend = None,
    max_batch: MaxBatch = None,
    max_tokens_per_step: MaxTokens = None,
    num_blocks: NumBlocks = None,
    num_host_blocks: NumHostBlocks = None,
    policy: Policy = None,
    max_gap_ms: MaxGap = None,
    limit: Limit = None,
    as_json: AsJson = False,
    fleet: Fleet = False,
    replicas: Replicas = None,
    max_replicas: MaxReplicas = 64,
    routing: RoutingNames = None,
    prefill: Prefill = 0,
    prefill_from: PrefillFrom = 512,
    pool_gb_s: PoolSpeed = 2.0,
    fail: Failures = None,
    slo_ttft_ms: SloTtft = None,
    slo_tpot_ms: SloTpot = None,
    slo_percentile: SloPercentile = 99.0,
    plot: Plot = None,
) -> None:
    """Replay a trace of requests against the scheduler, without a model: what a policy, a size or a fleet would do."""
    arrivals = read_trace(trace, limit)
    slo = (slo_ttft_ms, slo_tpot_ms, slo_percentile)
    many = FleetOptions(replicas, max_replicas, routing, prefill, prefill_from, pool_gb_s, fail, slo, plot)
    if not fleet:
        many.check_unused()
    asked = many.asked(as_json) if fleet else None
    base = _engine_config(config, model, backend)
    if not times.exists():
        with _bar() as bar:
            save_times(measure(base, _shown(bar, "measuring step times")), times)
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
    arrivals, note = servable(arrivals, Machine(engine, measured).max_seq_len)
    if note:
        Console(stderr=True).print(note, highlight=False)
    started_s = time.perf_counter()
    with _bar() as bar:
        if asked is not None:
            run_fleet(arrivals, engine, measured, asked, lambda name: _shown(bar, name))
            return
        found = run_simulation(arrivals, engine, measured, _shown(bar, "requests"))
    _print_simulated(found, time.perf_counter() - started_s, as_json)


def _shown(bar: Progress, name: str) -> Callable[[int, int], object]:
    task = bar.add_task(name, total=None)
    return lambda done, total: bar.update(task, completed=done, total=total)


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


def _engine_config(config: Path | None, model: str | None, backend: str | None) -> EngineConfig:
    """The engine of a config.json, else of the options. Raises BadRequest for options that would have no effect."""
    return _asked(config, model, backend)[0]


def _asked(config: Path | None, model: str | None, backend: str | None) -> tuple[EngineConfig, str]:
    """`_engine_config`, and the name by which the model was asked for; "" = by its path."""
    if config is not None:
        for name, value in (("--model", model), ("--backend", backend)):
            if value is not None:
                raise BadRequest(name, f"has no effect beside --config, which names it in {config}")
        card = read_model_card(config)
        return card.engine, card.name
    opened = named_backend(backend or "auto")
    if opened == "fake":
        if model is not None:
            raise BadRequest("--model", "has no effect with --backend mock, which has no weights")
        return EngineConfig(backend=opened), ""
    name = model or DEMO_MODEL
    return EngineConfig(model=str(find_model(name)), backend=opened), name if name in MODELS else ""


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


def tune(
    output: Annotated[Path, typer.Option(help="Folder for results; an interrupted run goes on there.")] = Path("tune"),
    config: Annotated[Path | None, typer.Option(help="A config.json to begin with; else --model.")] = None,
    model: Model = None,
    backend: Backend = None,
    lpot: Annotated[
        float | None, typer.Option(min=0.001, callback=finite, help="Longest mean ms of an output token.")
    ] = None,
    max_gap: Annotated[
        float | None,
        typer.Option(
            min=0, max=1000 * MAX_GAP_S, callback=finite, help="Longest ms between two tokens (maxDecodeGap)."
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="CSV of token ids (kvloom dataset); else random prompts.")] = None,
    input_len: Annotated[int, typer.Option(min=1, help="Average prompt without --data.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Average answer.")] = 128,
    max_output: Annotated[int, typer.Option(min=1, help="Longest answer (maxIterTimes).")] = 512,
    most: Annotated[int | None, typer.Option(min=1, help="Largest maxBatchSize to try.")] = None,
    point_s: Annotated[
        float, typer.Option(min=0.1, callback=finite, help="Seconds that each maxBatchSize may take.")
    ] = 30.0,
) -> None:
    """Measure machine and model, sweep maxBatchSize, and write a config.json with the reason for each value."""
    prompts = read_rows(data) if data else []
    average = sum(map(len, prompts)) / len(prompts) if prompts else float(input_len)
    workload = Workload(average, min(output_len, max_output), max_output)
    engine, name = _asked(config, model, backend)
    aim = Aim(workload, lpot, most, point_s, prompts, max_gap, name)
    with _bar() as bar:
        tasks: dict[str, Any] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what)
            bar.update(tasks[what], description=what, completed=done, total=total)

        tuned = run_tuning(engine, aim, output, show)
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
