"""`kvloom simulate --fleet` beside a real run of four mock replicas: ratios of throughput and p99 TTFT, and hit rates.

The replicas are engines with rank processes of their own that take real time; a request is routed by the same code when
it comes. `python -m benches fleet_simulation`; `python -m benches.fleet_simulation [NUM_REQUESTS]`.
"""

import asyncio
import random
import sys
import time
from contextlib import aclosing

import msgspec

from kvloom.contract.config import EngineConfig
from kvloom.contract.request import Request, SamplingParams
from kvloom.engine.schedule.blocks import extend_chain
from kvloom.engine.thread import EngineThread
from kvloom.rank.byte_tokenizer import ByteTokenizer
from kvloom.rank.opening import open_engine
from kvloom.tuning.figures import Times, figures
from kvloom.tuning.fleet.routing import ROUTINGS, Ask
from kvloom.tuning.fleet.simulate import Shape, simulate_fleet
from kvloom.tuning.steptime import StepTimes
from kvloom.tuning.trace import Arrival, Job, job_of

NUM_REPLICAS, NUM_BLOCKS, BLOCK_SIZE, MAX_SEQ_LEN = 4, 512, 16, 2048
STEP_S, TOKEN_S = 0.015, 0.0002
VOCAB_SIZE = 256
CONFIG = EngineConfig(
    backend="fake", num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_seq_len=MAX_SEQ_LEN, max_batch=16,
    max_tokens_per_step=512, fake_step_s=STEP_S, fake_token_s=TOKEN_S, max_gap_s=0.0,
)  # fmt: skip
TIMES = StepTimes(STEP_S, TOKEN_S, TOKEN_S, 0.0, 0.0, "fake", NUM_BLOCKS, BLOCK_SIZE, MAX_SEQ_LEN)


def conversations(num_requests: int) -> list[Arrival]:
    """Of 32 chats that share 4 beginnings, as many a second as keep four replicas busy."""
    draw, now_s, found = random.Random(1), 0.0, []
    for _ in range(num_requests):
        now_s += draw.expovariate(12)
        chat = draw.randrange(32)
        ids = (chat % 4, 100 + chat)[: draw.randrange(1, 3)]
        found.append(Arrival(now_s, 512 * len(ids) + draw.randrange(1, 200), draw.randrange(20, 80), hash_ids=ids))
    return found


async def replay(trace: list[Arrival], routing_name: str) -> tuple[list[Times], float, float]:
    """The real run: times, elapsed seconds, share of prompt tokens that were cached."""
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
    """A token that the mock has; prompts that differ still do."""
    return (token * 0x9E3779B97F4A7C15 >> 32) % VOCAB_SIZE


def main() -> None:
    trace = conversations(int(sys.argv[1]) if sys.argv[1:] else 240)
    for routing in ROUTINGS:
        runs, elapsed_s, hit_rate = asyncio.run(replay(trace, routing))
        real = figures(runs, elapsed_s)
        found = simulate_fleet(trace, CONFIG, TIMES, Shape(NUM_REPLICAS, routing))
        row = {
            "bench": "fleet_simulation",
            "routing": routing,
            "real_tok_s": round(real.generate_speed, 1),
            "real_p99_ttft_ms": round(real.first_token_ms.p99, 1),
            "tok_s_ratio": round(found.figures.generate_speed / real.generate_speed, 3),
            "p99_ttft_ratio": round(found.figures.first_token_ms.p99 / real.first_token_ms.p99, 3),
            "real_hit_rate": round(hit_rate, 3),
            "hit_rate": round(found.hit_rate, 3),
        }
        print(msgspec.json.encode(row).decode(), flush=True)


if __name__ == "__main__":
    main()
