"""Kernel-level speed of the CPU backend: `python benches/kernels.py model.gguf [--weight-format w8a8] [--kv-dtype bf16]
[--isa avx512]`.

Prints one JSON line: tokens/s of decode at batch 1, 8 and 32 (context about 200) and of a 1024-token prefill in chunks
of 256, with the memory bandwidth measured in the same run and decode's share of it (above 1 where the last-level cache
keeps a part of the weights). Medians; the rounds are interleaved, so a disturbance of the machine meets all rows alike.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvloom.engine.hub import pull
from kvloom.engine.kernels.cpu import CpuBackend
from kvloom.engine.weights.checkpoint import open_checkpoint

CONTEXT = 200
PREFILL, CHUNK = 1024, 256


def decode_args(backend: CpuBackend, batch: int) -> tuple[torch.Tensor, ...]:
    """Arguments of a step of one token for each of `batch` sequences with CONTEXT tokens cached."""
    width = CONTEXT // 16 + 1
    table = torch.randperm(batch * width, dtype=torch.int32).view(batch, width)
    ids = torch.randint(0, backend.spec.vocab_size, (batch,), dtype=torch.int32)
    pos, every = torch.full((batch,), CONTEXT, dtype=torch.int32), torch.arange(batch + 1, dtype=torch.int32)
    return ids, pos, every, table, every[:-1]


def decode_step(backend: CpuBackend, batch: int) -> Callable[[], object]:
    args = decode_args(backend, batch)
    return lambda: backend.step(*args)


def prefill(backend: CpuBackend) -> Callable[[], object]:
    table = torch.randperm(PREFILL // 16, dtype=torch.int32)[None]
    ids = torch.randint(0, backend.spec.vocab_size, (PREFILL,), dtype=torch.int32)
    qstart, last = torch.tensor([0, CHUNK], dtype=torch.int32), torch.tensor([CHUNK - 1], dtype=torch.int32)

    def run() -> None:
        for at in range(0, PREFILL, CHUNK):
            pos = torch.arange(at, at + CHUNK, dtype=torch.int32)
            backend.step(ids[at : at + CHUNK], pos, qstart, table, last)

    return run


def seconds(run: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", help="a folder or .gguf file; the demo model by default")
    parser.add_argument("--weight-format", default="w8a8")
    parser.add_argument("--kv-dtype", default="bf16")
    parser.add_argument("--isa", default=None)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.manual_seed(0)
    checkpoint = open_checkpoint(args.model or pull("smollm2"))
    start = time.perf_counter()
    backend = CpuBackend(checkpoint.spec, checkpoint.weights, 512, args.weight_format, args.kv_dtype, isa=args.isa)
    load_s = time.perf_counter() - start
    runs = {f"decode_{batch}": (decode_step(backend, batch), 20 if batch == 1 else 4, batch) for batch in (1, 8, 32)}
    runs["prefill_1024"] = (prefill(backend), 1, PREFILL)
    rates: dict[str, list[float]] = {name: [] for name in ("dram", *runs)}
    for run, _, _ in runs.values():
        run()
    for _ in range(args.rounds):
        rates["dram"].append(backend.probe_bandwidth())
        for name, (run, repeats, tokens) in runs.items():
            rates[name].append(tokens / seconds(run, repeats))
    median = {name: statistics.median(values) for name, values in rates.items()}
    streamed = backend.weight_bytes - backend._embed.nbytes
    shares = [streamed * one / dram for one, dram in zip(rates["decode_1"], rates["dram"], strict=True)]
    report = {
        "bench": "kernels", "isa": backend.isa, "weight_format": args.weight_format, "kv_dtype": args.kv_dtype,
        "threads": backend.num_threads,
        "load_s": round(load_s, 2), "weight_mb": round(streamed / 1e6, 1),
        "dram_gb_s": round(median.pop("dram") / 1e9, 1),
        "decode_1_share_of_dram": round(statistics.median(shares), 2),
        **{f"{name}_tok_s": round(value, 1) for name, value in median.items()},
    }  # fmt: skip
    print(json.dumps(report))


if __name__ == "__main__":
    main()
