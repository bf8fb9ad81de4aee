"""The choice of `kvloom tune` compared with every maxBatchSize measured alone: its share of the best throughput.

`python -m benches.engine.tuner [LPOT_MS [MOST [STEP [POINT_S]]]]`; both are measured anew, so the share has the noise
of two runs. Takes five minutes with the defaults.
"""

import sys
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import track

from kvloom.checkpoints.demo_models import pull
from kvloom.contract.config import EngineConfig
from kvloom.tuning.steptime import measure
from kvloom.tuning.sweep import Aim, run_point, tune
from kvloom.tuning.tune import Workload, choose

WORKLOAD = Workload(average_input=128, average_output=128, max_output=256)


def main() -> None:
    given = [float(value) for value in sys.argv[1:]]
    limit_ms, most, step, point_s = [*given, *(25.0, 48.0, 2.0, 8.0)[len(given) :]]
    config = EngineConfig(model=str(pull("smollm2")))
    aim = Aim(WORKLOAD, limit_ms, int(most), point_s)
    with tempfile.TemporaryDirectory() as folder:
        tuned = tune(config, aim, Path(folder))
    times, chosen = measure(config), tuned.chosen
    batches = sorted({*range(int(step), int(most) + 1, int(step)), chosen.max_batch})
    console = Console(stderr=True)
    every = [
        run_point(config, aim, times, batch, lambda what, done, total: None)
        for batch in track(batches, "the full sweep", console=console, transient=True)
    ]
    best = choose(every, limit_ms)
    again = next(point for point in every if point.max_batch == chosen.max_batch)
    row = {
        "bench": "tuner",
        "limit_ms": limit_ms,
        "chosen": chosen.max_batch,
        "num_runs": len(tuned.points),
        "best_of_sweep": best.max_batch,
        "num_sweep_runs": len(every),
        "share_of_best": round(again.generate_speed / best.generate_speed, 3),
        "lpot_ms": round(again.lpot_ms, 2),
        "sweep": [[p.max_batch, round(p.lpot_ms, 2), round(p.generate_speed, 1)] for p in every],
    }
    print(msgspec.json.encode(row).decode(), flush=True)


if __name__ == "__main__":
    main()
