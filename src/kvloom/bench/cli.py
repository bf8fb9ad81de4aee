"""`kvloom bench`: options, the order of the measurements, and where the results go."""

import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx
import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from kvloom.bench import load as loads
from kvloom.bench import process, report
from kvloom.bench.client import BenchError, Target
from kvloom.client.address import authorization, why_not_listed, without_version
from kvloom.contract.config import WEIGHT_FORMATS
from kvloom.contract.numbers import whole

LEVELS = ("all", "server", "kernels")
_START_LIMIT_S = 300.0
_KERNEL_ROUNDS = 7


@dataclass(frozen=True, slots=True)
class _Subject:
    """The subject of measurement: the server at `url`, or one started with `model` and `weight_format`."""

    url: str | None
    model: str | None
    weight_format: str | None
    api_key: str
    seed: str


def bench(
    url: Annotated[str | None, typer.Option(help="A running OpenAI-compatible server; else one is started.")] = None,
    model: Annotated[
        str | None, typer.Option(help="With --url the name requests use (its first); else what to serve (the demo).")
    ] = None,
    concurrency: Annotated[str, typer.Option(help="Requests in flight, one point each.")] = "1,8,32",
    num_prompts: Annotated[int | None, typer.Option(help="Requests a point; 3 x concurrency, at least 5.")] = None,
    input_len: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens of an answer.")] = 128,
    level: Annotated[str | None, typer.Option(help="all, server or kernels; with --url server, else all.")] = None,
    token_ids: Annotated[str, typer.Option(help="LOW,HIGH: prompts are drawn from these ids.")] = "1000,40000",
    weight_format: Annotated[str | None, typer.Option(help="auto, stored, w8a8, w4a8 or bf16; not with --url.")] = None,
    seed: Annotated[str | None, typer.Option(help="Same seed, same prompts; else prompts no cache has seen.")] = None,
    api_key: Annotated[str, typer.Option(help="API key, when the server asks for one.")] = "",
    save_json: Annotated[Path | None, typer.Option(help="Append one JSON line a point here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write an HTML page with the plots here.")] = None,
) -> None:
    """Measure a server, and the kernels and memory rate below it: tokens/s and time to first token."""
    url = without_version(url) if url else url
    level = level or ("server" if url else "all")
    low_high = _numbers("token_ids", token_ids)
    if level not in LEVELS:
        raise BenchError(f"level: {level!r} is none of {', '.join(LEVELS)}")
    if weight_format is not None and weight_format not in WEIGHT_FORMATS:
        raise BenchError(f"weight_format: {weight_format!r} is none of {', '.join(WEIGHT_FORMATS)}")
    if len(low_high) != 2:
        raise BenchError(f"token_ids: {token_ids!r} is no range LOW,HIGH")
    if url and (weight_format or level != "server"):
        raise BenchError(f"{'weight_format' if weight_format else 'level'}: a server at --url has its own kernels")
    wanted = [
        loads.Load(one, num_prompts or max(5, 3 * one), input_len, output_len, token_ids=(low_high[0], low_high[1]))
        for one in _numbers("concurrency", concurrency)
    ]
    for path in (save_json, plot):
        _check_output(path)
    common: report.Row = {}
    subject = _Subject(url, model, weight_format, api_key, seed or loads.new_seed())
    kernels = _kernels(model, weight_format) if level != "server" else []
    points = _server(subject, wanted, common) if level != "kernels" else []
    console = Console()
    if kernels:
        console.print(report.kernel_table(kernels))
    if points:
        console.print(*report.server_tables(points))
    for name, value in common.items():
        console.print(f"{name}: {value}", highlight=False)
    if save_json:
        with save_json.open("a", encoding="utf-8") as file:
            file.write(report.json_lines(points, kernels, common))
    if plot:
        plot.write_text(report.plot(f"kvloom bench {url or model or ''}".strip(), points, kernels), encoding="utf-8")


def _check_output(path: Path | None) -> None:
    """Raises BenchError where a file could not be written after minutes of measuring."""
    if path and not path.absolute().parent.is_dir():
        raise BenchError(f"{path}: there is no folder {path.absolute().parent}")
    if path and path.is_dir():
        raise BenchError(f"{path}: is a folder; name a file")


def _server(subject: _Subject, wanted: list[loads.Load], common: report.Row) -> list[loads.Point]:
    """Measure the server at a URL, or one that it starts; for that one, start time and memory are added to `common`."""
    url, model, seed = subject.url, subject.model, subject.seed
    with ExitStack() as stack:
        if url:
            target = Target(url, model or _first_model(url, subject.api_key), subject.api_key)
            return _points(target, wanted, seed)
        port = process.free_port()
        format_option = ["--weight-format", subject.weight_format] if subject.weight_format else []
        options = ["--served-model-name", "bench", *format_option]
        server = stack.enter_context(process.ServerProcess(process.serve_command(model or "", port, options)))
        target = Target(f"http://127.0.0.1:{port}", "bench")
        first = [wanted[0].token_ids[0]] * min(16, wanted[0].input_len)
        common["start_to_first_answer_s"] = round(server.first_answer_s(target, _START_LIMIT_S, first), 2)
        points = _points(target, wanted, seed)
        common["peak_rss_mb"] = round(server.peak_rss_bytes() / 1e6)
        return points


def _points(target: Target, wanted: list[loads.Load], seed: str) -> list[loads.Point]:
    points = []
    with _progress() as bar:
        for load in wanted:
            warm = loads.warm_up(load)
            task = bar.add_task(f"concurrency {load.concurrency}", total=warm.num_prompts + load.num_prompts)

            def advance(task: TaskID = task) -> None:
                bar.advance(task)

            uvloop.run(loads.run(target, warm, f"{seed}-warm-{load.concurrency}", advance))
            answers, wall_s = uvloop.run(loads.run(target, load, f"{seed}-{load.concurrency}", advance))
            points.append(loads.summarise(load, answers, wall_s))
    return points


def _kernels(model: str | None, weight_format: str | None) -> list[report.Row]:
    """Measure the kernels in a process of their own, which loads the weights and frees them at its end."""
    command = [sys.executable, "-m", "kvloom.bench.kernels", "--progress", "--rounds", str(_KERNEL_ROUNDS)]
    command += [model] if model else []
    command += ["--weight-format", weight_format] if weight_format else []
    rows: list[report.Row] = []
    with (
        _progress() as bar,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child,
    ):
        assert child.stdout is not None
        assert child.stderr is not None
        task = bar.add_task("kernels", total=_KERNEL_ROUNDS)
        for line in child.stdout:
            row = json.loads(line)
            if "done" in row:
                bar.update(task, completed=row["done"])
            else:
                rows.append(row)
        said = child.stderr.read().strip().split("\n")[-1]
    if child.returncode:
        raise BenchError(f"the kernels could not be measured: {said}")
    return rows


def _first_model(url: str, api_key: str) -> str:
    """The first model that the server lists."""
    try:
        reply = httpx.get(f"{url}/v1/models", headers=authorization(api_key), trust_env=False).raise_for_status()
        return str(reply.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BenchError(f"url: {url} does not list its models: {why_not_listed(error)}") from None
    except (ValueError, LookupError, TypeError):
        raise BenchError(f"url: {url} does not list its models; name one with --model") from None


def _numbers(field: str, text: str) -> list[int]:
    numbers = [number for part in text.split(",") if (number := whole(part.strip())) is not None]
    if len(numbers) <= text.count(","):
        raise BenchError(f"{field}: {text!r} is no list of whole numbers")
    return numbers


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
