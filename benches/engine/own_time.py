"""What the engine costs beside the model: its own time a step, with the fake model, at several batch sizes."""

import statistics
import time

import msgspec

from kvloom.contract.config import EngineConfig
from kvloom.contract.messages import Batch, StepOutput
from kvloom.contract.request import Request, SamplingParams
from kvloom.engine.engine import Engine
from kvloom.engine.link.executor import InProcessExecutor
from kvloom.rank.fake import ByteTokenizer, FakeRunner

NUM_ROUNDS = 5
NUM_TOKENS = 128


class TimedRunner(FakeRunner):
    """Adds up the time spent in the runner, so that it can be left out."""

    spent_s = 0.0

    def run(self, batch: Batch) -> StepOutput:
        started = time.perf_counter()
        output = super().run(batch)
        self.spent_s += time.perf_counter() - started
        return output


def step_cost_s(num_seqs: int) -> float:
    """Median over rounds of the engine's own time a step: plan, bookkeeping, text."""
    costs = []
    for _ in range(NUM_ROUNDS):
        config = EngineConfig(backend="fake", max_batch=num_seqs, max_tokens_per_step=2048)
        runner = TimedRunner(config)
        engine = Engine(config, InProcessExecutor(runner), ByteTokenizer())
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=1)
        for i in range(num_seqs):
            engine.add(Request(f"r{i}", tuple((i + j) % 256 for j in range(128)), params))
        started = time.perf_counter()
        while engine.has_work:
            engine.step()
        costs.append((time.perf_counter() - started - runner.spent_s) / engine.stats().total_steps)
    return statistics.median(costs)


def main() -> None:
    for num_seqs in (1, 8, 32, 64):
        cost_s = step_cost_s(num_seqs)
        row = {"bench": "engine", "num_seqs": num_seqs, "step_us": round(cost_s * 1e6, 1)}
        print(msgspec.json.encode(row | {"us_per_token": round(cost_s * 1e6 / num_seqs, 2)}).decode(), flush=True)


if __name__ == "__main__":
    main()
