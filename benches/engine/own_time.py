"""The engine's own time a step, without the model's: over the fake model, at several batch sizes.

Processor time, with warm caches and with caches that each step empties, as a model's kernels do.
"""

import statistics
import time

import msgspec
import numpy as np

from kvloom.contract.config import EngineConfig
from kvloom.contract.messages import Batch, StepOutput
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.engine.link.executor import InProcessExecutor
from kvloom.rank.fake import ByteTokenizer, FakeRunner

NUM_ROUNDS = 5
NUM_TOKENS = 128
EMPTYING_BYTES = 64 << 20  # read and written in each step; larger than a processor's caches


class TimedRunner(FakeRunner):
    """Measures the time spent in the runner, so that it can be subtracted."""

    def __init__(self, config: EngineConfig, empties_caches: bool) -> None:
        super().__init__(config)
        self.spent_s = 0.0
        self._bytes = np.zeros(EMPTYING_BYTES if empties_caches else 0, np.uint8)

    def run(self, batch: Batch) -> StepOutput:
        started = time.thread_time()
        output = super().run(batch)
        np.add(self._bytes, 1, out=self._bytes)
        self.spent_s += time.thread_time() - started
        return output


def step_cost_s(num_seqs: int, empties_caches: bool) -> float:
    """Median over rounds of the engine's own time a step: plan, bookkeeping, text."""
    costs = []
    for _ in range(NUM_ROUNDS):
        config = EngineConfig(backend="fake", max_batch=num_seqs, max_tokens_per_step=2048)
        runner = TimedRunner(config, empties_caches)
        engine = Engine(config, InProcessExecutor(runner), ByteTokenizer())
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=1)
        for i in range(num_seqs):
            engine.add(Request(f"r{i}", tuple((i + j) % 256 for j in range(128)), params))
        started = time.thread_time()
        while engine.has_work:
            engine.step()
        costs.append((time.thread_time() - started - runner.spent_s) / engine.stats().total_steps)
    return statistics.median(costs)


def main() -> None:
    for num_seqs in (1, 8, 32, 64):
        warm_us, cold_us = (1e6 * step_cost_s(num_seqs, empties) for empties in (False, True))
        row = {"bench": "engine", "num_seqs": num_seqs, "step_us": round(warm_us, 1), "cold_step_us": round(cold_us, 1)}
        print(msgspec.json.encode(row | {"us_per_token": round(warm_us / num_seqs, 2)}).decode(), flush=True)


if __name__ == "__main__":
    main()
