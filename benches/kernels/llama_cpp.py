"""The CPU kernels compared with llama.cpp's: the same file, two points of decoding and a prompt, in turns.

`python -m benches.kernels.llama_cpp MODEL.gguf --binaries FOLDER [--rounds 5] [--lengths 1024,8000] [--kv int8]`:
FOLDER holds `llama-bench` and `llama-batched-bench` as llama.cpp's build makes them. Both sides compute logits and
sample nothing, and warm up before each point. One JSON line a point: tokens/s of either side (medians), `ratio` of
these, `ratios`: the lowest and the highest ratio of a round.

  decode_1, decode_8   one token a sequence after 200 cached ones, 1 and 8 sequences
  prompt_512           one prompt of 512 tokens
  prompt_N, after_N    with --lengths, in their place: a prompt of N tokens in chunks of 2048, and one token after it
"""

import argparse
import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from kvloom.bench.kernels import CONTEXT as DEPTH
from kvloom.bench.kernels import decode_args
from kvloom.checkpoints import footprint
from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.contract.config import EngineConfig
from kvloom.rank.kernels.backend import Ragged
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions

PROMPT, SEQUENCES, CONTEXT, CHUNK = 512, (1, 8), 4096, 2048
NUM_BLOCKS, BLOCK_TOKENS = 200, 16
KV_TYPES = {"bf16": "f16", "int8": "q8_0"}  # kvloom's name: llama.cpp's of the same size


def decoding(backend: CpuBackend, steps: int, count: int, cached: int = DEPTH) -> float:
    """kvloom's tokens/s of `count` sequences with `cached` tokens each."""
    arguments = decode_args(backend, count, cached)
    backend.step(*arguments, [0] * count)
    begun_s = time.perf_counter()
    for _ in range(steps):
        backend.step(*arguments, [0] * count)
    return count * steps / (time.perf_counter() - begun_s)


def prompt(backend: CpuBackend, length: int) -> float:
    """kvloom's tokens/s of a prompt of `length` tokens."""
    ids = np.random.default_rng(0).integers(0, backend.spec.vocab_size, length).astype(np.int32)
    table = np.arange(-(-length // BLOCK_TOKENS), dtype=np.int32)[None]
    pos = np.arange(length, dtype=np.int32)

    def chunk(begin: int, end: int) -> None:
        bounds = np.array([0, end - begin], np.int32)
        batch = Ragged(ids[begin:end], pos[begin:end], bounds, table, places=bounds[:1])
        backend.step(batch, bounds[1:] - 1, [0])

    chunk(0, min(length, CHUNK))
    begun_s = time.perf_counter()
    for begin in range(0, length, CHUNK):
        chunk(begin, min(length, begin + CHUNK))
    return length / (time.perf_counter() - begun_s)


def ours(backend: CpuBackend, steps: int, lengths: Sequence[int]) -> dict[str, float]:
    """kvloom's tokens/s of each point."""
    if not lengths:
        found = {f"decode_{count}": decoding(backend, steps, count) for count in SEQUENCES}
        return found | {f"prompt_{PROMPT}": prompt(backend, PROMPT)}
    prompts = {f"prompt_{length}": prompt(backend, length) for length in lengths}
    return prompts | {f"after_{length}": decoding(backend, steps, 1, length) for length in lengths}


def theirs(binaries: Path, file: str, steps: int, lengths: Sequence[int], kv_type: str) -> dict[str, float]:
    """llama.cpp's tokens/s of each point."""

    def run(name: str, *options: object) -> list[dict[str, float]]:
        command = [binaries / name, "-m", file, "-t", 2, "-ctk", kv_type, "-ctv", kv_type, *options]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def decode(cached: int, count: int, context: int, *options: object) -> dict[str, float]:
        sizes = ("-c", context, "-npp", cached, "-ntg", steps, "-npl", count)
        (row,) = run("llama-batched-bench", "-tb", 2, "-fa", "on", *sizes, *options, "--output-format", "jsonl")
        return row

    if not lengths:
        (row,) = run("llama-bench", "-fa", 1, "-p", PROMPT, "-n", 0, "-r", 1, "-o", "jsonl")
        found = {count: decode(DEPTH, count, CONTEXT, "-b", PROMPT, "-ub", PROMPT) for count in SEQUENCES}
        rates = {f"decode_{count}": row["speed_tg"] for count, row in found.items()}
        return rates | {f"prompt_{PROMPT}": row["avg_ts"]}
    rows = {length: decode(length, 1, length + 64, "-b", CHUNK) for length in lengths}
    prompts = {f"prompt_{length}": row["speed_pp"] for length, row in rows.items()}
    return prompts | {f"after_{length}": row["speed_tg"] for length, row in rows.items()}


def line(point: str, rounds: list[tuple[Mapping[str, float], Mapping[str, float]]]) -> dict[str, object]:
    """One line of the output."""
    pairs = [(mine[point], other[point]) for mine, other in rounds]
    mine, other = (median(side) for side in zip(*pairs, strict=True))
    each = sorted(a / b for a, b in pairs)
    both = {"kvloom_tok_s": round(mine, 2), "llama_cpp_tok_s": round(other, 2), "ratio": round(mine / other, 3)}
    return {"point": point, "rounds": len(pairs), **both, "ratios": [round(each[0], 3), round(each[-1], 3)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--binaries", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24, help="decoded tokens a sequence")
    parser.add_argument("--lengths", type=lambda text: [*map(int, text.split(","))], default=[], help="of long prompts")
    parser.add_argument("--kv", choices=tuple(KV_TYPES), default="bf16", help="type of keys and values")
    args = parser.parse_args()
    checkpoint = open_checkpoint(args.file)
    most = max(args.lengths, default=0) + 64
    spec = checkpoint.spec.served(max(CONTEXT, most))
    form = footprint.weight_format(EngineConfig(model=args.file, weight_format="stored"), spec, checkpoint.weights.form)
    num_blocks = max(NUM_BLOCKS, most // BLOCK_TOKENS)
    backend = CpuBackend(spec, checkpoint.weights, num_blocks, CpuOptions(form, args.kv))
    peer = (args.binaries, args.file, args.steps, args.lengths, KV_TYPES[args.kv])
    rounds = [(ours(backend, args.steps, args.lengths), theirs(*peer)) for _ in range(args.rounds)]
    common = {"bench": "llama_cpp", "file": Path(args.file).name, "isa": backend.isa, "kv": args.kv}
    for point in rounds[0][0]:
        print(json.dumps(common | line(point, rounds)), flush=True)
    memory = round(backend.weight_bytes / Path(args.file).stat().st_size, 3)
    print(json.dumps(common | {"held_as": backend.held_as, "memory_to_file": memory}), flush=True)


if __name__ == "__main__":
    main()
