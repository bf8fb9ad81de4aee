"""Kernel-level speed of the CPU backend, in a process of its own: `python -m kvloom.bench.kernels [MODEL]
[--weight-format auto] [--kv-dtype bf16] [--isa avx512] [--rounds 7]`.

Prints one JSON line a point: tokens/s of decode at batch 1, 8 and 32 (context about 200) and of a 1024-token prefill in
chunks of 256. Each has the memory bandwidth measured in the same run, the rate at which it could deliver the weights
(`limit_tok_s`, decode only) and the share of it that was reached (above 1 where the last-level cache keeps a part of
the weights). Medians; the rounds are interleaved, so a disturbance of the machine affects all points alike.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from kvloom.checkpoints import footprint
from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.demo_models import find_model, pull
from kvloom.contract.config import WEIGHT_FORMATS as CHOICES
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import ServingError
from kvloom.rank.kernels.backend import Ints, Ragged
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions

BATCHES = (1, 8, 32)
CONTEXT = 200
PREFILL, CHUNK = 1024, 256


def decode_args(backend: CpuBackend, batch: int, cached: int = CONTEXT) -> tuple[Ragged, Ints]:
    """Arguments of a step of one token for each of `batch` sequences with `cached` tokens each."""
    width = cached // 16 + 1
    random = np.random.default_rng(0)
    table = random.permutation(np.arange(batch * width, dtype=np.int32)).reshape(batch, width)
    ids = random.integers(0, backend.spec.vocab_size, batch, np.int32)
    pos, every = np.full(batch, cached, np.int32), np.arange(batch + 1, dtype=np.int32)
    return Ragged(ids, pos, every, table, places=every[:-1]), every[:-1]


def decode_step(backend: CpuBackend, batch: int) -> Callable[[], object]:
    args = decode_args(backend, batch)
    return lambda: backend.step(*args, [0] * batch)


def prefill(backend: CpuBackend) -> Callable[[], object]:
    random = np.random.default_rng(0)
    table = random.permutation(np.arange(PREFILL // 16, dtype=np.int32))[None]
    ids = random.integers(0, backend.spec.vocab_size, PREFILL, np.int32)
    qstart, last = np.array([0, CHUNK], np.int32), np.array([CHUNK - 1], np.int32)

    def run() -> None:
        for at in range(0, PREFILL, CHUNK):
            pos = np.arange(at, at + CHUNK, dtype=np.int32)
            backend.step(Ragged(ids[at : at + CHUNK], pos, qstart, table, places=qstart[:1]), last, [0])

    return run


def seconds(run: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def measure(backend: CpuBackend, rounds: int, progress: Callable[[int], None]) -> list[dict[str, object]]:
    """One row a point; `progress` is called with the number of finished rounds."""
    runs = {f"decode_{batch}": (decode_step(backend, batch), 20 if batch == 1 else 4, batch) for batch in BATCHES}
    runs["prefill_1024"] = (prefill(backend), 1, PREFILL)
    rates: dict[str, list[float]] = {name: [] for name in ("dram", *runs)}
    for run, _, _ in runs.values():
        run()
    for done in range(rounds):
        rates["dram"].append(backend.probe_bandwidth())
        for name, (run, repeats, tokens) in runs.items():
            rates[name].append(tokens / seconds(run, repeats))
        progress(done + 1)
    common = {"threads": backend.num_threads, "dram_gb_s": round(statistics.median(rates["dram"]) / 1e9, 1)}
    rows: list[dict[str, object]] = []
    for name, (_, _, tokens) in runs.items():
        rows.append({"level": "kernel", "name": name, "tok_s": round(statistics.median(rates[name]), 1), **common})
        if name.startswith("decode"):
            limits = [dram / backend.streamed_bytes * tokens for dram in rates["dram"]]
            shares = [rate / limit for rate, limit in zip(rates[name], limits, strict=True)]
            share = round(statistics.median(shares), 2)
            rows[-1] |= {"batch": tokens, "limit_tok_s": round(statistics.median(limits), 1), "share_of_limit": share}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a folder, a .gguf file or a fetched model; the demo model by default")
    parser.add_argument("--weight-format", default="auto", choices=CHOICES)
    parser.add_argument("--kv-dtype", default="bf16")
    parser.add_argument("--isa", default=None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--progress", action="store_true", help="say after each round how many are done")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds: {args.rounds} is below 1")
    try:
        checkpoint = open_checkpoint(find_model(args.model) if args.model else pull("smollm2"))
        start = time.perf_counter()
        config = EngineConfig(model=str(checkpoint.path), weight_format=args.weight_format)
        weight_format = footprint.weight_format(config, checkpoint.spec, checkpoint.weights.form)
        options = CpuOptions(weight_format, args.kv_dtype, isa=args.isa)
        backend = CpuBackend(checkpoint.spec, checkpoint.weights, 512, options)
    except ServingError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    common = {
        "isa": backend.isa, "weight_format": weight_format, "kv_dtype": args.kv_dtype,
        "load_s": round(time.perf_counter() - start, 2), "weight_mb": round(backend.streamed_bytes / 1e6, 1),
    }  # fmt: skip
    say = (lambda done: print(json.dumps({"done": done}), flush=True)) if args.progress else (lambda done: None)
    for row in measure(backend, args.rounds, say):
        print(json.dumps(row | common), flush=True)


if __name__ == "__main__":
    main()
