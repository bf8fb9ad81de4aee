"""Streams beside long prompts: the longest gaps between tokens, and what keeping them short costs in throughput.

`python -m benches.server.streams` serves the demo model twice, once with `--max-gap-ms 0` (throughput first) and once
with the default (`--max-gap-ms` gives another), and measures them in turns: 32 streams of 128 + 128 tokens, 64 in all,
beside prompts of 1,024 tokens and answers of 16, `--long` of them, one every `--every` seconds. Both do the same work;
a round ends when all of it is answered. One JSON line a round and server, then one with the medians:

  gap_ms        median and p99 of the streams' gaps
  quiet_ms      their median without prompts, in a separate load before
  p99_to_median, p99_to_quiet   the p99 over each of the two medians
  tok_s         all tokens, of prompts and answers, over the time of the round
  share         tok_s over that of throughput first, in the same round
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from contextlib import ExitStack

import uvloop

from kvloom.bench.client import Answer, Target, complete
from kvloom.bench.load import Load, new_seed, percentiles, run
from kvloom.bench.process import ServerProcess

FIRST = "throughput first"
LONG_INPUT, LONG_OUTPUT = 1024, 16
PORTS = {FIRST: 8111, "gap": 8112}


async def long_answers(target: Target, count: int, every_s: float, seed: str) -> list[Answer]:
    """Send prompts at fixed times, whether or not earlier ones are answered."""
    started_s = time.perf_counter()

    async def one(index: int, prompt: list[int]) -> Answer:
        await asyncio.sleep(started_s + index * every_s - time.perf_counter())
        return await complete(target, prompt, LONG_OUTPUT)

    prompts = Load(1, count, LONG_INPUT, LONG_OUTPUT).prompts(seed)
    return await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))


async def one_round(target: Target, load: Load, long: int, every_s: float, seed: str) -> dict[str, object]:
    calm = await run(target, Load(load.concurrency, load.concurrency, 16, 48), f"{seed}-calm")
    quiet_ms = percentiles([gap for answer in calm[0] for gap in answer.gaps_s]).p50
    started_s = time.perf_counter()
    (answers, _), longs = await asyncio.gather(
        run(target, load, seed), long_answers(target, long, every_s, f"{seed}-long")
    )
    wall_s = time.perf_counter() - started_s
    gaps = percentiles([gap for answer in answers for gap in answer.gaps_s])
    num_tokens = len(answers) * load.input_len + len(longs) * LONG_INPUT
    num_tokens += sum(answer.num_tokens for answer in (*answers, *longs))
    return {
        "gap_ms": {"p50": gaps.p50, "p99": gaps.p99},
        "quiet_ms": quiet_ms,
        "p99_to_median": round(gaps.p99 / gaps.p50, 2),
        "p99_to_quiet": round(gaps.p99 / quiet_ms, 2),
        "first_token_ms": percentiles([answer.ttft_s for answer in answers]).p50,
        "long_first_token_ms": percentiles([answer.ttft_s for answer in longs]).p50,
        "tok_s": round(num_tokens / wall_s, 1),
    }


def medians(rounds: list[dict[str, object]]) -> dict[str, float]:
    names = [name for name, value in rounds[0].items() if isinstance(value, float)]
    return {name: round(statistics.median(float(str(values[name])) for values in rounds), 3) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-gap-ms", default="-1", help="of the second server")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--long", type=int, default=12)
    parser.add_argument("--every", type=float, default=0.8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    gaps = {FIRST: "0", "gap": options.max_gap_ms}
    load = Load(options.streams, 2 * options.streams)
    found: dict[str, list[dict[str, object]]] = {name: [] for name in gaps}
    with ExitStack() as stack:
        targets = {}
        for name, gap_ms in gaps.items():
            flags = ["--port", str(PORTS[name]), "--served-model-name", "m", "--max-gap-ms", gap_ms]
            flags += ["--weight-format", "stored"]
            server = stack.enter_context(
                ServerProcess([sys.executable, "-m", "kvloom.cli", "serve", options.model, *flags])
            )
            targets[name] = Target(f"http://127.0.0.1:{PORTS[name]}", "m")
            server.first_answer_s(targets[name], 300, [1000] * 16)
            uvloop.run(one_round(targets[name], Load(8, 8, 128, 16), 2, 0.1, new_seed()))
        for turn in range(options.rounds):
            for name in list(gaps)[:: 1 if turn % 2 else -1]:
                values = uvloop.run(one_round(targets[name], load, options.long, options.every, new_seed()))
                found[name].append(values)
                print(json.dumps({"bench": "streams", "server": name, "round": turn, **values}), flush=True)
    for first, own in zip(found[FIRST], found["gap"], strict=True):
        own["share"] = round(float(str(own["tok_s"])) / float(str(first["tok_s"])), 3)
    for name, rounds in found.items():
        print(json.dumps({"bench": "streams", "server": name, "max_gap_ms": gaps[name], **medians(rounds)}), flush=True)


if __name__ == "__main__":
    main()
