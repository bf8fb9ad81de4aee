"""`kvloom bench`: options, the order of the measurements, and where the results go."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvloom.bench import load as loads
from kvloom.bench import process, report
from kvloom.bench.client import BenchError, Target
from kvloom.bench.conversation import Player, Script
from kvloom.bench.hits import between, figures_of
from kvloom.client.address import authorization, why_not_listed, without_version
from kvloom.contract.config import WEIGHT_FORMATS
from kvloom.contract.numbers import whole

LEVELS = ("all", "server", "kernels")
SCENARIOS = ("load", "conversation")
_THIS_MACHINE = ("127.0.0.1", "::1", "localhost")
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

    @property
    def title(self) -> str:
        return f"kvloom bench {self.url or self.model or ''}".strip()


class _Outcome(NamedTuple):
    """What a scenario found: tables for people, facts of the whole run, JSON lines, an HTML page."""

    tables: list[Table]
    common: report.Row
    lines: str
    page: str


def bench(
    url: Annotated[str | None, typer.Option(help="A running OpenAI-compatible server; else one is started.")] = None,
    model: Annotated[
        str | None, typer.Option(help="With --url the name requests use (its first); else what to serve (the demo).")
    ] = None,
    scenario: Annotated[str, typer.Option(help="load, or conversation: turns, branches, edits, tool loops.")] = "load",
    concurrency: Annotated[str | None, typer.Option(help="Requests in flight, one point each: 1,8,32.")] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Requests a point; 3 x concurrency, at least 5.")] = None,
    input_len: Annotated[int | None, typer.Option(help="Tokens of a prompt, 128; of a message, 60.")] = None,
    output_len: Annotated[int | None, typer.Option(help="Tokens of an answer, 128; in a conversation 200.")] = None,
    shared_len: Annotated[int | None, typer.Option(help="Tokens that all conversations begin with, 1200.")] = None,
    num_turns: Annotated[int | None, typer.Option(help="Turns of the first conversation, 12.")] = None,
    num_branches: Annotated[int | None, typer.Option(help="Conversations beside it, 16.")] = None,
    level: Annotated[str | None, typer.Option(help="all, server or kernels; with --url server, else all.")] = None,
    token_ids: Annotated[str, typer.Option(help="LOW,HIGH: prompts are drawn from these ids.")] = "1000,40000",
    weight_format: Annotated[str | None, typer.Option(help="auto, stored, w8a8, w4a8 or bf16; not with --url.")] = None,
    seed: Annotated[str | None, typer.Option(help="Same seed, same prompts; else prompts no cache has seen.")] = None,
    api_key: Annotated[str, typer.Option(help="API key, when the server asks for one.")] = "",
    save_json: Annotated[Path | None, typer.Option(help="Append one JSON line a point here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write an HTML page with the plots here.")] = None,
) -> None:
    """Measure a server, and the kernels and memory rate below it: tokens/s and time to first token. With --scenario
    conversation: how many tokens of conversations it computes again.
    """
    url = without_version(url) if url else url
    low_high = _numbers("token_ids", token_ids)
    _check_names(url, scenario, level, weight_format)
    if len(low_high) != 2:
        raise BenchError(f"token_ids: {token_ids!r} is no range LOW,HIGH")
    for path in (save_json, plot):
        _check_output(path)
    subject = _Subject(url, model, weight_format, api_key, seed or loads.new_seed())
    lengths = {"input_len": input_len, "output_len": output_len, "token_ids": (low_high[0], low_high[1])}
    conversation = {"shared_len": shared_len, "num_turns": num_turns, "num_branches": num_branches}
    load = {"concurrency": concurrency, "num_prompts": num_prompts, "level": level}
    _refuse(scenario, load if scenario == "conversation" else conversation)
    if scenario == "conversation":
        outcome = _converse(subject, Script(**_given(lengths | conversation)))
    else:
        many = _numbers("concurrency", concurrency or "1,8,32")
        wanted = [loads.Load(one, num_prompts or max(5, 3 * one), **_given(lengths)) for one in many]
        outcome = _measure(subject, wanted, level or ("server" if url else "all"))
    Console().print(*outcome.tables)
    for name, value in outcome.common.items():
        Console().print(f"{name}: {value}", highlight=False)
    if save_json:
        with save_json.open("a", encoding="utf-8") as file:
            file.write(outcome.lines)
    if plot:
        plot.write_text(outcome.page, encoding="utf-8")


def _check_names(url: str | None, scenario: str, level: str | None, weight_format: str | None) -> None:
    known = (
        ("scenario", scenario, SCENARIOS),
        ("level", level, LEVELS),
        ("weight_format", weight_format, WEIGHT_FORMATS),
    )
    for field, name, names in known:
        if name is not None and name not in names:
            raise BenchError(f"{field}: {name!r} is none of {', '.join(names)}")
    if url and (weight_format or (level or "server") != "server"):
        raise BenchError(f"{'weight_format' if weight_format else 'level'}: a server at --url has its own kernels")


def _refuse(scenario: str, options: Mapping[str, object]) -> None:
    """Raises BenchError for options that the scenario does not have."""
    for name, value in options.items():
        if value is not None:
            raise BenchError(f"{name}: --scenario {scenario} has none")


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _check_output(path: Path | None) -> None:
    """Raises BenchError where a file could not be written after minutes of measuring."""
    if path and not path.absolute().parent.is_dir():
        raise BenchError(f"{path}: there is no folder {path.absolute().parent}")
    if path and path.is_dir():
        raise BenchError(f"{path}: is a folder; name a file")


@contextmanager
def _serving(subject: _Subject, first_ids: Sequence[int], common: report.Row) -> Iterator[Target]:
    """The server at a URL, or one that is started; for that one, start time and memory are added to `common`."""
    url, model = subject.url, subject.model
    if url:
        yield Target(url, model or _first_model(url, subject.api_key), subject.api_key)
        here = urlsplit(url)
        pid = process.listener_pid(here.port or 80) if here.hostname in _THIS_MACHINE else None
        if pid:
            common["peak_rss_mb"] = round(process.peak_rss_bytes(pid) / 1e6)
        return
    port = process.free_port()
    format_option = ["--weight-format", subject.weight_format] if subject.weight_format else []
    options = ["--served-model-name", "bench", *format_option]
    with process.ServerProcess(process.serve_command(model or "", port, options)) as server:
        target = Target(f"http://127.0.0.1:{port}", "bench")
        common["start_to_first_answer_s"] = round(server.first_answer_s(target, _START_LIMIT_S, first_ids), 2)
        yield target
        common["peak_rss_mb"] = round(server.peak_rss_bytes() / 1e6)


def _measure(subject: _Subject, wanted: list[loads.Load], level: str) -> _Outcome:
    """The scenario `load`."""
    common: report.Row = {}
    kernels = _kernels(subject.model, subject.weight_format) if level != "server" else []
    points: list[loads.Point] = []
    if level != "kernels":
        with _serving(subject, [wanted[0].token_ids[0]] * min(16, wanted[0].input_len), common) as target:
            points = _points(target, wanted, subject.seed)
    tables = ([report.kernel_table(kernels)] if kernels else []) + (report.server_tables(points) if points else [])
    lines, page = report.json_lines(points, kernels, common), report.plot(subject.title, points, kernels)
    return _Outcome(tables, common, lines, page)


def _converse(subject: _Subject, script: Script) -> _Outcome:
    """The scenario `conversation`."""
    common: report.Row = {}
    first = [script.token_ids[0]] * 16
    with _serving(subject, first, common) as target, _progress() as bar:
        task = bar.add_task("conversations", total=script.num_requests)
        player, before = Player(script, subject.seed), figures_of(target)
        exchanges = uvloop.run(player.play(target, lambda: bar.advance(task)))
        common |= between(before, figures_of(target))
    tables = [report.conversation_table(exchanges)]
    lines, page = (report.conversation_lines(exchanges, common), report.conversation_plot(subject.title, exchanges))
    return _Outcome(tables, common, lines, page)


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
