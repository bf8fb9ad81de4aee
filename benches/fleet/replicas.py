"""Costs and gains of a fleet, over mock models at the pace of real ones: `python -m benches.fleet.replicas PART`.

hits    64 chats of 8 turns with shared system prompts on 4 replicas: prefix hit rate and p99 TTFT, by exact prefixes
        and by Serve's choice of two, beside one replica with the memory of all four; --plot draws them
kills   replicas killed repeatedly in mid-stream: the number of errors, and of answers that differ from an undisturbed
        run

All parts of one run are measured on the same machine in turns. The client and the fleet share its cores.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import psutil

from kvloom.contract.sampling import SamplingParams
from kvloom.processes.inside import signal_at_end_of_thread
from kvloom.rank.fake import fake_answer

_TEXT = "the of and to in is that for it as was with be by on not he his but at are this have from or had an they"


@dataclass
class Seen:
    """Measurements of the clients of one run."""

    ttft_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_wrong: int = 0
    num_errors: int = 0
    wall_s: float = 0.0

    @property
    def p99_s(self) -> float:
        return sorted(self.ttft_s)[int(0.99 * (len(self.ttft_s) - 1))]


@contextmanager
def serving(command: list[str], args: dict[str, Any] | None = None) -> Iterator[tuple[str, int]]:
    """Run `kvloom COMMAND`, with a fleet.yaml of `args` if given; its URL and process id."""
    if args is not None:
        application = {"import_path": "kvloom.fleet.app:build", "args": {"backend": "fake", "cpusPerRank": 0.1, **args}}
        path = Path(f"/tmp/kvloom-bench-fleet-{os.getpid()}.yaml")
        path.write_text(json.dumps({"applications": [application]}))
        command = [*command, "--fleet", str(path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvloom", *command, "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=signal_at_end_of_thread,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        while line and "http://" not in line:
            line = process.stdout.readline()
        assert line, "the server did not start"
        yield "http" + line.split("http", 1)[1].split()[0].rstrip("."), process.pid
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


async def ask(client: httpx.AsyncClient, prompt: str, seen: Seen, max_tokens: int, seed: int | None = None) -> str:
    """The text of one streamed answer; with a seed it is compared with the mock's truth."""
    body = {
        "model": "mock", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True,
        "temperature": 0 if seed is None else 1, "seed": seed,
    }  # fmt: skip
    began_s, text = time.perf_counter(), ""
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                if not text:
                    seen.ttft_s.append(time.perf_counter() - began_s)
                event = json.loads(line[6:])
                if "error" in event:
                    raise httpx.HTTPError(str(event))
                text += event["choices"][0]["text"]
                seen.num_tokens += 1
    except httpx.HTTPError as error:
        seen.num_errors += 1
        print(f"  error: {error}", file=sys.stderr)
    if seed is not None:
        params = SamplingParams(temperature=1, seed=seed, ignore_eos=True)
        ids = fake_answer(list(prompt.encode()), params, seed, max_tokens)
        seen.num_wrong += text != bytes(token for token in ids if token < 256).decode()
    return text


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=300, trust_env=False, limits=httpx.Limits(max_connections=None))


# -- hits


def _text(source: random.Random, num_chars: int) -> str:
    words: list[str] = []
    while sum(map(len, words)) + len(words) < num_chars:
        words.append(source.choice(_TEXT.split()))
    return " ".join(words)[:num_chars]


async def chats(url: str, num_chats: int, num_turns: int, think_s: float) -> Seen:
    """Run chats on one of 8 system prompts each; a turn is a user's text and an answer. A token is a character."""
    seen, source = Seen(), random.Random(1)
    systems = [_text(source, 768) for _ in range(8)]
    began_s = time.perf_counter()

    async def chat(number: int, client: httpx.AsyncClient) -> None:
        own = random.Random(number)
        prompt = systems[number % len(systems)]
        for _ in range(num_turns):
            await asyncio.sleep(own.expovariate(1 / think_s))
            prompt += "\nuser: " + _text(own, 120) + "\nmodel: "
            prompt += await ask(client, prompt, seen, 32)

    async with _client(url) as client:
        await asyncio.gather(*(chat(number, client) for number in range(num_chats)))
    seen.wall_s = time.perf_counter() - began_s
    return seen


def measure_hits(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the table, one for each policy."""
    blocks = options.blocks
    mock = {"stepMs": 8, "tokenMs": 0.25}
    cases = [
        ("one replica, all memory", {"replicas": 1, "numBlocks": 4 * blocks}),
        ("exact prefixes", {"replicas": 4, "numBlocks": blocks}),
        ("choice of two", {"replicas": 4, "numBlocks": blocks, "router": {"policy": "power-of-two"}}),
    ]
    rows = []
    for name, args in cases:
        with serving(["fleet", "run"], {"maxSeqLen": 4096, "mock": mock, **args}) as (url, _):
            seen = asyncio.run(chats(url, options.chats, options.turns, options.think))
            time.sleep(3)  # replicas report their metrics once a second
            text = httpx.get(f"{url}/metrics", trust_env=False).text
        prompt, cached = (_metric(text, metric) for metric in ("prompt_tokens_total", "npu_radix_match_hit_num"))
        rows.append({"policy": name, "hits": cached / prompt, "p99_s": seen.p99_s, "errors": seen.num_errors})
        print(
            f"{name:26} hit rate {cached / prompt:.3f}  p99 TTFT {seen.p99_s * 1e3:7.0f} ms  errors {seen.num_errors}"
        )
    one, exact, two = rows
    print(
        f"hit rate: {exact['hits'] / one['hits']:.3f} of one replica's (choice of two {two['hits'] / one['hits']:.3f})"
    )
    print(f"p99 TTFT: {exact['p99_s'] / two['p99_s']:.2f} of the choice of two's")
    return rows


def _metric(text: str, name: str) -> float:
    """The sum of a metric's samples."""
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Hit rate and p99 TTFT of each policy, side by side."""
    import_module("matplotlib").use("Agg")
    pyplot: Any = import_module("matplotlib.pyplot")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 2.6), layout="constrained")
    names = [row["policy"] for row in rows][::-1]
    colours = ["#b0b0b0", "#2b6cb0", "#7a9cc6"]
    for axis, values, title in (
        (left, [row["hits"] for row in rows], "prefix hit rate"),
        (right, [row["p99_s"] * 1e3 for row in rows], "p99 TTFT, ms"),
    ):
        bars = axis.barh(names, values[::-1], color=colours)
        axis.bar_label(bars, fmt="%.2f" if max(values) <= 1 else "%.0f", padding=3)
        axis.set_title(title, loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.15)
    right.set_yticklabels([])
    figure.savefig(path, dpi=150)


# -- kills


async def under_kills(url: str, pid: int, num_kills: int, num_streams: int) -> Seen:
    """Run `num_streams` clients, each of which streams repeatedly, while replicas are killed."""
    seen, is_over = Seen(), asyncio.Event()

    async def stream(number: int, client: httpx.AsyncClient) -> None:
        turn = 0
        while not is_over.is_set():
            await ask(client, f"stream {number} turn {turn} " * 4, seen, 64, seed=number + 100 * turn)
            turn += 1

    async with _client(url) as client:
        tasks = [asyncio.create_task(stream(number, client)) for number in range(num_streams)]
        for _ in range(num_kills):
            while len(alive := _engines(pid)) < 2 or await _num_ready(client) < 2:
                await asyncio.sleep(0.1)
            await asyncio.sleep(random.random())
            os.kill(random.choice(alive), signal.SIGKILL)
        is_over.set()
        await asyncio.gather(*tasks)
    return seen


def _engines(pid: int) -> list[int]:
    children = psutil.Process(pid).children(recursive=True)
    return [child.pid for child in children if child.is_running() and "engines" in _title(child)]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


async def _num_ready(client: httpx.AsyncClient) -> int:
    feed = (await client.get("/console/feed")).json()
    return sum(each["is_ready"] for each in feed["models"][0]["replicas"])


def measure_kills(options: argparse.Namespace) -> None:
    with serving(["fleet", "run"], {"replicas": 2, "mock": {"stepMs": 10}, "maxSeqLen": 1024}) as (url, pid):
        seen = asyncio.run(under_kills(url, pid, options.kills, options.streams))
        feed = httpx.get(f"{url}/console/feed", trust_env=False).json()["models"][0]
    print(
        f"{options.kills} kills under {options.streams} streams: {len(seen.ttft_s)} answers, {seen.num_wrong} wrong, "
        f"{seen.num_errors} errors, {feed['moves']} moves, {feed['lost']} lost"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("hits", "kills"))
    parser.add_argument("--chats", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--think", type=float, default=2.0, help="mean seconds between an answer and the next turn")
    parser.add_argument("--blocks", type=int, default=2048, help="KV blocks of 16 tokens a replica")
    parser.add_argument("--plot", type=Path, help="draw the hits to this file")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args()
    if options.part == "hits":
        rows = measure_hits(options)
        if options.plot:
            plot(rows, options.plot)
    else:
        measure_kills(options)


if __name__ == "__main__":
    main()
