"""Many conversations that are all alive: what the cache holds of them, and how long streams stall.

`python -m benches.server.live [MODEL] [--conversations 64] [--turns 2] [--streams 8] [--rounds 1]` serves a model
twice, with its default options and with `--snapshot-share 0`, which keeps no states, so that layers with a state
compute each prompt anew. Both take the turns of the same conversations, all first turns, then all second ones,
`--streams` at a time; a prompt is the conversation so far with `--input` new tokens. MODEL is a random GGUF file of
Qwen3.5-0.8B's shape if none is given.

One JSON line a round and server:

  gap_ms        median, p99 and longest gap between two pieces of an answer
  p99_to_median, longest_to_median
  cached        share of the prompts' tokens that were not computed
  snapshots     most kept states at any time, `snapshots_max` as many as there may be, `evicted` those given up
  rss_mb        peak of resident memory
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from benches.server.hybrid_gguf import make_hybrid_gguf
from kvloom.bench.client import Answer, Target, complete
from kvloom.bench.load import TOKEN_IDS, draw, new_seed
from kvloom.bench.process import ServerProcess, free_port, serve_command
from kvloom.checkpoints.demo_models import find_model

MODEL = "m"
START_LIMIT_S = 300.0
WATCH_S = 0.5
SERVERS = {"default": (), "no states kept": ("--snapshot-share", "0")}
FIGURES = ("snapshots", "snapshots_max", "snapshots_evicted_total")


def figures_of(target: Target) -> dict[str, int]:
    text = httpx.get(f"{target.url}/metrics", trust_env=False).raise_for_status().text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.name: int(sample.value) for sample in samples if sample.name in FIGURES}


async def converse(target: Target, args: argparse.Namespace, seed: str) -> list[Answer]:
    """The answers to all turns of all conversations. A turn begins when all conversations have had the one before."""
    shared = draw(f"{seed}-shared", args.shared, *TOKEN_IDS)
    histories = [list(shared) for _ in range(args.conversations)]
    slots = asyncio.Semaphore(args.streams)
    answers: list[Answer] = []

    async def take_turn(index: int, turn: int) -> None:
        histories[index] += draw(f"{seed}-{index}-{turn}", args.input, *TOKEN_IDS)
        async with slots:
            answer = await complete(target, histories[index], args.output, {"return_token_ids": True})
        histories[index] += answer.token_ids
        answers.append(answer)

    for turn in range(args.turns):
        await asyncio.gather(*(take_turn(index, turn) for index in range(args.conversations)))
    return answers


async def one_round(target: Target, args: argparse.Namespace, seed: str) -> dict[str, Any]:
    most, before = 0, figures_of(target)

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, (await asyncio.to_thread(figures_of, target)).get("snapshots", 0))
            await asyncio.sleep(WATCH_S)

    watcher = asyncio.create_task(watch())
    answers = await converse(target, args, seed)
    watcher.cancel()
    after = figures_of(target)
    gaps_s = [gap for answer in answers for gap in answer.gaps_s]
    p50, p99, longest = (1e3 * float(value) for value in np.percentile(gaps_s, (50, 99, 100)))
    evicted = after.get("snapshots_evicted_total", 0) - before.get("snapshots_evicted_total", 0)
    return {
        "gap_ms": {"p50": round(p50, 1), "p99": round(p99, 1), "longest": round(longest, 1)},
        "p99_to_median": round(p99 / p50, 2),
        "longest_to_median": round(longest / p50, 2),
        "cached": round(sum(each.num_cached or 0 for each in answers) / sum(each.num_prompt for each in answers), 3),
        "snapshots": most,
        "snapshots_max": after.get("snapshots_max", 0),
        "evicted": evicted,
    }


def measure(model: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        servers: dict[str, tuple[ServerProcess, Target]] = {}
        for name, options in SERVERS.items():
            port = free_port()
            command = serve_command(str(model), port, ("--served-model-name", MODEL, *options))
            server = stack.enter_context(ServerProcess(command))
            servers[name] = server, Target(f"http://127.0.0.1:{port}", MODEL)
            server.first_answer_s(servers[name][1], START_LIMIT_S, [1000] * 16)
            server.set_running(False)
        for number in range(args.rounds):
            seed = new_seed()
            for name in list(SERVERS)[:: 1 if number % 2 == 0 else -1]:
                server, target = servers[name]
                server.set_running(True)
                found = uvloop.run(one_round(target, args, seed))
                server.set_running(False)
                rss_mb = round(server.peak_rss_bytes() / 1e6)
                yield {"bench": "live", "server": name, "round": number, **found, "rss_mb": rss_mb}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    for name, value in (("conversations", 64), ("turns", 2), ("streams", 8), ("rounds", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--shared", type=int, default=400, help="tokens that all conversations begin with")
    parser.add_argument("--input", type=int, default=60, help="tokens of a message")
    parser.add_argument("--output", type=int, default=40, help="tokens of an answer")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = args.model or make_hybrid_gguf(find_model("smollm2"), Path(name) / "hybrid.gguf")
        for row in measure(model, args):
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
