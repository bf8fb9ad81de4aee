"""The cost of sampling: a decode step with sampling from all logits in numpy, against sampling with the kernels' help
(from their candidates where these suffice, else with a native draw).

`python -m benches.engine.sampling` prints one JSON line a batch size and kind of request: milliseconds of each, medians
of interleaved rounds. Both ways give the same tokens, which is checked.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from kvloom.bench.kernels import CONTEXT, decode_args
from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.demo_models import pull
from kvloom.contract.sampling import SamplingParams
from kvloom.rank.kernels.cpu import CpuBackend
from kvloom.rank.sampler import History, num_candidates, sample, sample_top

KINDS = {
    "greedy": SamplingParams(temperature=0),
    "top-k 40": SamplingParams(top_k=40, seed=1),
    "greedy, frequency penalty": SamplingParams(temperature=0, frequency_penalty=0.3),
    "temperature 0.7": SamplingParams(temperature=0.7, seed=1),
    "temperature 0.7, top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9, seed=1),
}
EOS = [2]


def ways(backend: CpuBackend, batch: int, params: SamplingParams) -> dict[str, Callable[[], list[int]]]:
    args = decode_args(backend, batch)
    rows = [
        History(list(range(CONTEXT)), CONTEXT - 20, params, seed, dict.fromkeys(range(20), 1)) for seed in range(batch)
    ]
    tops = [num_candidates(row, len(EOS)) for row in rows]

    def plain() -> list[int]:
        head = backend.step(*args, [0] * batch)
        return [sample(logits, row, EOS)[0] for logits, row in zip(head.full, rows, strict=True)]

    def kernels() -> list[int]:
        head = backend.step(*args, tops)
        if not tops[0]:
            return [sample(logits, row, EOS, backend.draw)[0] for logits, row in zip(head.full, rows, strict=True)]
        return [
            sample_top(head.values[i, :top], head.ids[i, :top], rows[i], EOS, backend.draw)
            for i, top in enumerate(tops)
        ]  # fmt: skip

    return {"plain": plain, "kernels": kernels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", help="a folder or .gguf file; the demo model by default")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    checkpoint = open_checkpoint(args.model or pull("smollm2"))
    backend = CpuBackend(checkpoint.spec, checkpoint.weights, 512)
    for batch in (1, 8, 32):
        for kind, params in KINDS.items():
            runs = ways(backend, batch, params)
            assert runs["plain"]() == runs["kernels"]()
            spent: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(args.rounds):
                for name, run in runs.items():
                    start = time.perf_counter()
                    run()
                    spent[name].append(time.perf_counter() - start)
            median = {f"{name}_ms": round(1e3 * statistics.median(values), 2) for name, values in spent.items()}
            ratio = round(statistics.median(spent["kernels"]) / statistics.median(spent["plain"]), 3)
            print(json.dumps({"bench": "sampling", "batch": batch, "kind": kind, **median, "ratio": ratio}), flush=True)


if __name__ == "__main__":
    main()
