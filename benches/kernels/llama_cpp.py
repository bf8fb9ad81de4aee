"""The CPU kernels compared with llama.cpp's: the same file, two points of decoding and a prompt, in turns.

`python -m benches.kernels.llama_cpp MODEL.gguf --binaries FOLDER [--rounds 5]`: FOLDER holds `llama-bench` and
`llama-batched-bench` as llama.cpp's build makes them. Both sides compute logits and sample nothing, and warm up before
each point. One JSON line a point: tokens/s of either side (medians), `ratio` of these, `ratios`: the lowest and the
highest ratio of a round.

  decode_1, decode_8   one token a sequence after 200 cached ones, 1 and 8 sequences
  prompt_512           one prompt of 512 tokens
"""

import argparse
import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import numpy as np

from kvloom.bench.kernels import decode_args
from kvloom.checkpoints import footprint
from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.contract.config import EngineConfig
from kvloom.rank.kernels.backend import Ragged
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions

CACHED, PROMPT, SEQUENCES, CONTEXT = 200, 512, (1, 8), 4096
NUM_BLOCKS, BLOCK_TOKENS = 200, 16


def ours(backend: CpuBackend, steps: int) -> dict[str, float]:
    """kvloom's tokens/s of each point."""
    found = {}
    for count in SEQUENCES:
        arguments = decode_args(backend, count)
        backend.step(*arguments, [0] * count)
        begun_s = time.perf_counter()
        for _ in range(steps):
            backend.step(*arguments, [0] * count)
        found[f"decode_{count}"] = count * steps / (time.perf_counter() - begun_s)
    ids = np.random.default_rng(0).integers(0, backend.spec.vocab_size, PROMPT).astype(np.int32)
    table = np.arange(PROMPT // BLOCK_TOKENS, dtype=np.int32)[None]
    bounds = np.array([0, PROMPT], np.int32)
    batch = Ragged(ids, np.arange(PROMPT, dtype=np.int32), bounds, table, places=bounds[:1])
    last = np.array([PROMPT - 1], np.int32)
    backend.step(batch, last, [0])
    begun_s = time.perf_counter()
    backend.step(batch, last, [0])
    return found | {f"prompt_{PROMPT}": PROMPT / (time.perf_counter() - begun_s)}


def theirs(binaries: Path, file: str, steps: int) -> dict[str, float]:
    """llama.cpp's tokens/s of each point."""

    def run(name: str, *options: str) -> str:
        command = [str(binaries / name), "-m", file, "-t", "2", *options]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    (prompt,) = json.loads(run("llama-bench", "-fa", "1", "-p", str(PROMPT), "-n", "0", "-r", "1", "-o", "json"))
    sizes = ("-c", str(CONTEXT), "-b", str(PROMPT), "-ub", str(PROMPT), "-npp", str(CACHED), "-ntg", str(steps))
    several = ",".join(map(str, SEQUENCES))
    text = run("llama-batched-bench", "-tb", "2", "-fa", "on", *sizes, "-npl", several, "--output-format", "jsonl")
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {f"prompt_{PROMPT}": prompt["avg_ts"]} | {f"decode_{row['pl']}": row["speed_tg"] for row in rows}


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
    args = parser.parse_args()
    checkpoint = open_checkpoint(args.file)
    spec = checkpoint.spec.served(CONTEXT)
    form = footprint.weight_format(EngineConfig(model=args.file, weight_format="stored"), spec, checkpoint.weights.form)
    backend = CpuBackend(spec, checkpoint.weights, NUM_BLOCKS, CpuOptions(form))
    rounds = [(ours(backend, args.steps), theirs(args.binaries, args.file, args.steps)) for _ in range(args.rounds)]
    common = {"bench": "llama_cpp", "file": Path(args.file).name, "isa": backend.isa}
    for point in rounds[0][0]:
        print(json.dumps(common | line(point, rounds)), flush=True)
    memory = round(backend.weight_bytes / Path(args.file).stat().st_size, 3)
    print(json.dumps(common | {"held_as": backend.held_as, "memory_to_file": memory}), flush=True)


if __name__ == "__main__":
    main()
