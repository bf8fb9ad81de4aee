"""The simulator beside the engine on the same requests: throughput of both, their ratio, and simulated steps a second.

`python -m benches engine.simulate`; with arguments: `python -m benches.engine.simulate [NUM_REQUESTS]`.
"""

import random
import sys
import time

import msgspec

from kvloom.checkpoints.demo_models import pull
from kvloom.contract.config import EngineConfig
from kvloom.tuning.drive import drive
from kvloom.tuning.simulate import simulate
from kvloom.tuning.steptime import measure
from kvloom.tuning.trace import Arrival

VOCAB_SIZE = 40_000  # smaller than the vocabulary of every model that is measured


def main() -> None:
    num_requests = int(sys.argv[1]) if sys.argv[1:] else 64
    config = EngineConfig(model=str(pull("smollm2")), max_batch=16, max_iter_times=64)
    times, draw = measure(config), random.Random(1)
    for length in (64, 256):
        lengths = [draw.randrange(length // 2, length * 3 // 2) for _ in range(num_requests)]
        prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(n)] for n in lengths]
        real = drive(config, prompts)
        trace = [Arrival(0.0, len(p), len(a)) for p, a in zip(prompts, real.answers, strict=True)]
        started_s = time.perf_counter()
        found = simulate(trace, config, times)
        row = {
            "bench": "simulate",
            "prompt_tokens": length,
            "real_tok_s": round(real.figures.generate_speed, 1),
            "simulated_tok_s": round(found.figures.generate_speed, 1),
            "ratio": round(found.figures.generate_speed / real.figures.generate_speed, 3),
            "fit_median_error": round(times.median_error, 3),
            "steps_per_wall_s": round(found.num_steps / (time.perf_counter() - started_s)),
        }
        print(msgspec.json.encode(row).decode(), flush=True)


if __name__ == "__main__":
    main()
