"""`kvloom simulate --fleet` beside a real run of four mock replicas: ratios of throughput and p99 TTFT, and hit rates.

The replicas are engines with their own rank processes that take real time; the same code routes each request when it
comes. Step times are measured as `kvloom simulate` does, on four engines at once, since they share the machine. Each
ratio is the median over NUM_RUNS traces, each with its own measurement of step times.
`python -m benches fleet.simulation`; `python -m benches.fleet.simulation [NUM_REQUESTS [NUM_RUNS]]`.
"""

import asyncio
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import msgspec

from kvloom.contract.config import EngineConfig
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.schedule.blocks import extend_chain
from kvloom.engine.schedule.cost import Load
from kvloom.engine.thread import EngineThread
from kvloom.rank.byte_tokenizer import ByteTokenizer
from kvloom.rank.opening import open_engine
from kvloom.tuning.figures import Times, figures
from kvloom.tuning.fleet.routing import ROUTINGS, Ask
from kvloom.tuning.fleet.simulate import Shape, simulate_fleet
from kvloom.tuning.steptime import StepTimes, measure
from kvloom.tuning.trace import Arrival, Job, job_of

NUM_REPLICAS, NUM_BLOCKS, BLOCK_SIZE, MAX_SEQ_LEN = 4, 512, 16, 2048
STEP_S, TOKEN_S = 0.03, 0.0004  # long compared with the processor time of four engines on two cores
REQUESTS_PER_S = 6
PARTS = ("base_s", "few_token_s", "token_s", "sample_s", "kilopair_s")
VOCAB_SIZE = 256
CONFIG = EngineConfig(
    backend="fake", num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_seq_len=MAX_SEQ_LEN, max_batch=16,
    max_tokens_per_step=512, fake_step_s=STEP_S, fake_token_s=TOKEN_S, max_gap_s=0.0,
)  # fmt: skip


def measured() -> StepTimes:
    """The means of the step times that four engines measure at once."""
    with ThreadPoolExecutor(NUM_REPLICAS) as threads:
        found = list(threads.map(lambda _: measure(CONFIG), range(NUM_REPLICAS)))
    means = {part: statistics.mean(getattr(times, part) for times in found) for part in PARTS}
    return msgspec.structs.replace(found[0], **means)


def conversations(num_requests: int, seed: int) -> list[Arrival]:
    """A trace of requests of 32 chats that share 4 prefixes, at a rate that keeps four replicas busy."""
    draw, now_s, found = random.Random(seed), 0.0, []
    for _ in range(num_requests):
        now_s += draw.expovariate(REQUESTS_PER_S)
        chat = draw.randrange(32)
        ids = (chat % 4, 100 + chat)[: draw.randrange(1, 3)]
        found.append(Arrival(now_s, 512 * len(ids) + draw.randrange(1, 200), draw.randrange(20, 80), hash_ids=ids))
    return found


async def replay(trace: list[Arrival], routing_name: str) -> tuple[list[Times], float, float]:
    """Run the trace on real engines: times of each request, elapsed seconds, share of cached prompt tokens."""
    engines = {f"replica-{i}": open_engine(CONFIG, ByteTokenizer) for i in range(NUM_REPLICAS)}
    routing = ROUTINGS[routing_name](dict.fromkeys(engines, NUM_BLOCKS), BLOCK_SIZE)
    loop, num_cached = asyncio.get_running_loop(), 0
    for engine in engines.values():
        engine.start(loop)
    started_s = time.perf_counter()

    async def visit(index: int, job: Job) -> Times:
        nonlocal num_cached
        await asyncio.sleep(max(0.0, started_s + job.arrival_s - time.perf_counter()))
        tokens = tuple(_byte_of(token) for token in job.tokens)
        hashes: list[bytes] = []
        extend_chain(hashes, tokens, BLOCK_SIZE, job.salt)
        engine: EngineThread = engines[routing.route(Ask(index, hashes, len(tokens)), list(engines))]
        params = SamplingParams(temperature=0, max_tokens=job.num_output, ignore_eos=True)
        run = Times(len(tokens), time.perf_counter())
        async with aclosing(engine.stream(Request(str(index), tokens, params, cache_salt=job.salt))) as deltas:
            async for delta in deltas:
                if delta.token_ids and not run.num_output:
                    routing.begun(index)
                run.take(len(delta.token_ids), time.perf_counter())
                cached = delta.num_cached_tokens
        routing.ended(index)
        num_cached += cached
        run.ended_s = time.perf_counter()
        return run

    runs = await asyncio.gather(*(visit(index, job_of(index, arrival)) for index, arrival in enumerate(trace)))
    elapsed_s = time.perf_counter() - started_s
    for engine in engines.values():
        await asyncio.to_thread(engine.close)
    return list(runs), elapsed_s, num_cached / sum(run.num_input for run in runs)


def _byte_of(token: int) -> int:
    """Map a token into the mock's vocabulary; different prompts stay different."""
    return (token * 0x9E3779B97F4A7C15 >> 32) % VOCAB_SIZE


def compare(trace: list[Arrival], times: StepTimes, routing: str) -> dict[str, float]:
    """The figures of one real run and of its simulation."""
    runs, elapsed_s, hit_rate = asyncio.run(replay(trace, routing))
    real = figures(runs, elapsed_s)
    found = simulate_fleet(trace, CONFIG, times, Shape(NUM_REPLICAS, routing))
    ttft, foretold = real.first_token_ms, found.figures.first_token_ms
    assert ttft is not None  # every request was answered
    assert foretold is not None
    return {
        "real_tok_s": real.generate_speed,
        "real_p50_ttft_ms": ttft.p50,
        "real_p99_ttft_ms": ttft.p99,
        "tok_s_ratio": found.figures.generate_speed / real.generate_speed,
        "p50_ttft_ratio": foretold.p50 / ttft.p50,
        "p99_ttft_ratio": foretold.p99 / ttft.p99,
        "real_hit_rate": hit_rate,
        "hit_rate": found.hit_rate,
        "decode_step_ratio": times.step_s(Load(4, 4, 4000)) / (STEP_S + 4 * TOKEN_S),
    }


def main() -> None:
    num_requests, num_runs = (int(text) for text in [*sys.argv[1:], *("240", "3")[len(sys.argv) - 1 :]])
    rows: dict[str, list[dict[str, float]]] = {routing: [] for routing in ROUTINGS}
    for seed in range(num_runs):
        trace, times = conversations(num_requests, seed), measured()
        for routing in ROUTINGS:
            rows[routing].append(compare(trace, times, routing))
    for routing, each in rows.items():
        medians = {name: round(statistics.median(row[name] for row in each), 3) for name in each[0]}
        ratios = [round(row["p99_ttft_ratio"], 3) for row in each]
        row = {"bench": "fleet_simulation", "routing": routing, **medians, "p99_ttft_ratios": ratios}
        print(msgspec.json.encode(row).decode(), flush=True)


if __name__ == "__main__":
    main()
