"""Compares instruction sets of the CPU kernels: `python -m benches.kernels.isas [MODEL] [--isas avx512 amx]
[--weight-format w8a8] [--kv-dtype bf16] [--rounds 7]`.

One JSON line for a prompt of 1,024 tokens and for decodes of 8 to 64 sequences: milliseconds of all threads' processor
time with each, and the ratio of the first to the others in the same round. They take turns in one process;
processor time leaves out other programs of the machine. Medians.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

from kvloom.bench.kernels import decode_step, prefill
from kvloom.checkpoints import footprint
from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.demo_models import find_model
from kvloom.contract.config import WEIGHT_FORMATS, EngineConfig
from kvloom.rank.kernels.build import ISAS
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions

BATCHES, STEPS, BLOCKS = (8, 16, 32, 64), 4, 1024


def processor_ms(run: Callable[[], object], repeats: int) -> float:
    start = time.process_time()
    for _ in range(repeats):
        run()
    return (time.process_time() - start) / repeats * 1e3


def points(backend: CpuBackend) -> dict[str, tuple[Callable[[], object], int]]:
    """The steps to run, and how often each runs in a round."""
    decodes = {f"decode_{batch}": (decode_step(backend, batch), STEPS) for batch in BATCHES}
    return {"prefill_1024": (prefill(backend), 1), **decodes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--isas", nargs="+", choices=ISAS, default=["avx512", "amx"])
    parser.add_argument("--weight-format", default="auto", choices=WEIGHT_FORMATS)
    parser.add_argument("--kv-dtype", default="bf16")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    checkpoint = open_checkpoint(find_model(args.model))
    config = EngineConfig(model=str(checkpoint.path), weight_format=args.weight_format)
    form = footprint.weight_format(config, checkpoint.spec, checkpoint.weights.form)
    runs = {
        isa: points(CpuBackend(checkpoint.spec, checkpoint.weights, BLOCKS, CpuOptions(form, args.kv_dtype, isa=isa)))
        for isa in args.isas
    }
    first, *others = args.isas
    for name in runs[first]:
        rounds = [{isa: processor_ms(*of_isa[name]) for isa, of_isa in runs.items()} for _ in range(args.rounds + 1)][
            1:
        ]  # the first round warms up
        times = {isa: round(statistics.median(each[isa] for each in rounds), 1) for isa in runs}
        ratios = {isa: round(statistics.median(each[first] / each[isa] for each in rounds), 2) for isa in others}
        print(
            json.dumps({"bench": "isas", "name": name, "weight_format": form, "processor_ms": times, "ratio": ratios})
        )


if __name__ == "__main__":
    main()
