"""kvloom beside other servers on the same machine, in interleaved rounds: medians, and ratios to the best peer.

    python -m benches.server.peers --start "kvloom=kvloom serve --port 8101 --served-model-name m" \
        --peer kvloom=http://127.0.0.1:8101,m --peer llama=http://127.0.0.1:8102,m --rounds 3 --save-json peers.jsonl

The first --peer is compared with the others. A server is running already, or --start gives its command: it is then
started by this program, timed from its start to its first answer, stopped (SIGSTOP) while another has its turn, since
some servers use a part of a core even when idle, and ended at the end. Prompts are random token ids,
answers greedy and of the length asked for, so all servers do the same work. Every round visits every server, in
rotating order, so a disturbance of the machine affects all alike. Peak memory is that of the process that listens on
the port and of its children (Linux).
"""

import argparse
import asyncio
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvloom.bench.client import BenchError, Target
from kvloom.bench.load import Load, new_seed, run, summarise
from kvloom.bench.process import ServerProcess, listener_pid, peak_rss_bytes

START_LIMIT_S = 300.0
Values = dict[str, float]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table; a ratio above 1 means that kvloom is better, for rates and for times."""

    name: str
    unit: str
    is_rate: bool = False  # more is better


ROWS = {
    "single": Row("1 stream, decode", "tok/s", is_rate=True),
    "ttft_128": Row("1 stream, TTFT of 128 tokens", "ms"),
    "c8": Row("8 streams, 128 in, 128 out", "tok/s", is_rate=True),
    "c32": Row("32 streams, 128 in, 128 out", "tok/s", is_rate=True),
    "ttft_1024": Row("1,024-token prompt, TTFT", "ms"),
    "prefix": Row("prefix hit, 900 of 932 tokens, TTFT", "ms"),
    "gap_p99": Row("p99 gap between tokens, 32 streams beside 1,024-token prompts", "ms"),
    "gap_ratio": Row("the same over the median gap", "x"),
    "start": Row("start to first answer", "s"),
    "rss": Row("peak resident memory", "MB"),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The number of requests in a round; `share` below 1 makes a short round."""

    share: float
    token_ids: tuple[int, int]

    def load(self, concurrency: int, num: int, input_len: int, output_len: int = 128, shared_len: int = 0) -> Load:
        least = max(2, min(num, concurrency))
        num = max(least, round(num * self.share))
        output_len = max(min(output_len, 8), round(output_len * self.share))
        return Load(concurrency, num, input_len, output_len, shared_len, self.token_ids)


async def warm(target: Target, sizes: Sizes, seed: str) -> None:
    for concurrency, input_len in ((1, 128), (1, 1024), (8, 128), (32, 128)):
        load = replace(sizes.load(concurrency, concurrency, input_len), num_prompts=concurrency, output_len=8)
        await run(target, load, f"{seed}-{concurrency}-{input_len}")


async def one_round(target: Target, sizes: Sizes, seed: str, done: Callable[[], None]) -> Values:
    """Measure every row that one running server can give."""
    values: Values = {}
    load = sizes.load(1, 5, 128)
    point = summarise(load, *await run(target, load, f"{seed}-single"))
    values["ttft_128"] = point.ttft_ms.p50
    if point.tpot_ms.p50:  # 0: the whole answer came in one piece
        values["single"] = 1e3 / point.tpot_ms.p50
    done()
    for concurrency in (8, 32):
        load = sizes.load(concurrency, 3 * concurrency, 128)
        values[f"c{concurrency}"] = summarise(load, *await run(target, load, f"{seed}-c{concurrency}")).tok_s
        done()
    load = sizes.load(1, 5, 1024, 16)
    values["ttft_1024"] = summarise(load, *await run(target, load, f"{seed}-prefill")).ttft_ms.p50
    done()
    load = sizes.load(1, 16, 32, 32, shared_len=900)
    answers, _ = await run(target, load, f"{seed}-prefix")
    values["prefix"] = 1e3 * statistics.median(answer.ttft_s for answer in answers[1:])
    done()
    gaps = await gaps_s(target, sizes, f"{seed}-gaps")
    p99, median = statistics.quantiles(gaps, n=100, method="inclusive")[98], statistics.median(gaps)
    values["gap_p99"] = 1e3 * p99
    if median:
        values["gap_ratio"] = p99 / median
    done()
    return values


async def gaps_s(target: Target, sizes: Sizes, seed: str) -> list[float]:
    """Gaps between tokens of 32 streams while 1,024-token prompts come one after another, one at a time."""
    load, long = sizes.load(32, 64, 128), Load(1, 1, 1024, 4, token_ids=sizes.token_ids)

    async def intrude() -> None:
        for i in range(1_000_000):
            await run(target, long, f"{seed}-long-{i}")

    intruder = asyncio.create_task(intrude())
    try:
        answers, _ = await run(target, load, seed)
    finally:
        intruder.cancel()
        (outcome,) = await asyncio.gather(intruder, return_exceptions=True)
    if isinstance(outcome, BenchError):
        raise outcome
    return [gap for answer in answers for gap in answer.gaps_s]


def medians(rounds: Sequence[Values]) -> Values:
    """The median of each row that every round has."""
    names = [name for name in rounds[0] if all(name in values for values in rounds)]
    return {name: statistics.median(values[name] for values in rounds) for name in names}


def ratios(medians_of: dict[str, Values]) -> dict[str, tuple[float, str]]:
    """Row -> (how many times better the first server is than the best other, that other's name)."""
    own, *others = medians_of
    found = {}
    for name, row in ROWS.items():
        rivals = {other: medians_of[other][name] for other in others if medians_of[other].get(name)}
        if not rivals or not medians_of[own].get(name):
            continue
        best = (max if row.is_rate else min)(rivals, key=lambda other: rivals[other])
        ratio = medians_of[own][name] / rivals[best]
        found[name] = (ratio if row.is_rate else 1 / ratio, best)
    return found


def table(medians_of: dict[str, Values]) -> Table:
    drawn = Table("", *medians_of, "ratio to the best peer", title="Medians; a ratio above 1 is the first ahead")
    for column in drawn.columns[1:]:
        column.justify = "right"
    compared = ratios(medians_of)
    for name, row in ROWS.items():
        values = [f"{values[name]:,.1f} {row.unit}" if name in values else "" for values in medians_of.values()]
        ratio, best = compared.get(name, (0.0, ""))
        drawn.add_row(row.name, *values, f"{ratio:.2f} ({best})" if best else "")
    return drawn


def named(option: str, text: str) -> tuple[str, str]:
    """Split NAME=VALUE. Raises BenchError."""
    name, equals, value = text.partition("=")
    if not name or not equals or not value:
        raise BenchError(f"{option}: {text!r} is not NAME=VALUE")
    return name, value


def parse_peers(texts: Sequence[str], starts: Sequence[str]) -> tuple[dict[str, Target], dict[str, list[str]]]:
    """Name -> target, and name -> command. Raises BenchError."""
    targets: dict[str, Target] = {}
    for text in texts:
        name, value = named("peer", text)
        url, comma, model = value.rpartition(",")
        if not comma or not url or not model:
            raise BenchError(f"peer: {text!r} is not NAME=URL,MODEL")
        if name in targets:
            raise BenchError(f"peer: {name} is given twice")
        targets[name] = Target(url.rstrip("/"), model)
    commands = {name: shlex.split(value) for name, value in (named("start", text) for text in starts)}
    for name in commands:
        if name not in targets:
            raise BenchError(f"start: {name} is the name of no --peer")
    return targets, commands


def compare(
    targets: dict[str, Target], commands: dict[str, list[str]], rounds: int, sizes: Sizes
) -> dict[str, list[Values]]:
    """The values of every round. Raises BenchError, with the server's name, at the first one that fails."""
    seed = new_seed()
    found: dict[str, list[Values]] = {name: [] for name in targets}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with ExitStack() as stack, Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        steps = bar.add_task("", total=6 * rounds * len(targets))
        starts, servers = {}, dict[str, ServerProcess]()
        for name, command in commands.items():
            bar.update(steps, description=f"{name}: start")
            servers[name] = stack.enter_context(ServerProcess(command))
            starts[name] = servers[name].first_answer_s(targets[name], START_LIMIT_S, [sizes.token_ids[0]] * 16)
            call(name, warm(targets[name], sizes, f"{seed}-warm"))
            servers[name].set_running(False)
        for name in targets.keys() - servers.keys():
            bar.update(steps, description=f"{name}: warm-up")
            call(name, warm(targets[name], sizes, f"{seed}-warm"))
        for turn in range(rounds):
            names = list(targets)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                bar.update(steps, description=f"{name}: round {turn + 1}")
                with alone(servers.get(name)):
                    values = call(name, one_round(targets[name], sizes, f"{seed}-{turn}", lambda: bar.advance(steps)))
                if name in starts:
                    values["start"] = starts[name]
                pid = listener_pid(urlsplit(targets[name].url).port or 80)
                if pid:
                    values["rss"] = peak_rss_bytes(pid) / 1e6
                found[name].append(values)
    return found


@contextmanager
def alone(server: ServerProcess | None) -> Iterator[None]:
    """A server's turn: continued (SIGCONT) before it, stopped after it, if this program has started it."""
    if server is None:
        yield
        return
    server.set_running(True)
    try:
        yield
    finally:
        server.set_running(False)


def call(name: str, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; an error names the server."""
    try:
        return uvloop.run(work)
    except BenchError as error:
        raise BenchError(f"{name}: {error}") from None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", required=True, help="NAME=URL,MODEL; the first is compared")
    parser.add_argument("--start", action="append", default=[], help="NAME=COMMAND that starts this server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="below 1: fewer requests and shorter answers")
    parser.add_argument("--token-ids", type=int, nargs=2, default=(1000, 40000), metavar=("LOW", "HIGH"))
    parser.add_argument("--save-json", type=Path, help="append one JSON line a server and round, and one of ratios")
    args = parser.parse_args()
    try:
        if args.rounds < 1 or not 0 < args.share <= 1:
            raise BenchError("rounds: at least 1" if args.rounds < 1 else "share: above 0 and at most 1")
        targets, commands = parse_peers(args.peer, args.start)
        found = compare(targets, commands, args.rounds, Sizes(args.share, tuple(args.token_ids)))
    except BenchError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1
    middle = {name: medians(rounds) for name, rounds in found.items()}
    Console().print(table(middle))
    lines = [
        {"bench": "peers", "server": name, "round": i, **{key: round(value, 3) for key, value in values.items()}}
        for name, rounds in found.items()
        for i, values in enumerate(rounds)
    ]
    compared = {key: {"ratio": round(ratio, 3), "to": best} for key, (ratio, best) in ratios(middle).items()}
    lines.append({"bench": "peers", "server": next(iter(targets)), "ratios": compared})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    if args.save_json:
        with args.save_json.open("a", encoding="utf-8") as file:
            file.write(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
