"""GGUF files of every type that llama-quantize writes: perplexity of the CPU backend beside llama.cpp's own.

`python -m benches.kernels.block_types [MODEL.gguf] --binaries FOLDER [--types Q2_K,IQ3_S] [--weight-format stored]`
requantises a model to each type and lets both sides read the same file and text. FOLDER holds `llama-quantize` and
`llama-perplexity` as llama.cpp's build makes them. Both count the second half of windows of 512 tokens. Types that need
a list of importance get one in which all columns are equal. One JSON line a type: `kvloom` and `llama.cpp`, their
`ratio`, the block types in the file, its `bits` a weight and those that the backend holds; then one line that names the
types whose ratio is above 1.005, and an exit status of 1 if there are any.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benches.kernels.perplexity import text
from kvloom.checkpoints import footprint
from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.demo_models import pull
from kvloom.checkpoints.gguf_types import GGUF_TYPES
from kvloom.checkpoints.metadata import read_header
from kvloom.contract.config import WEIGHT_FORMATS as CHOICES
from kvloom.contract.config import EngineConfig
from kvloom.engine.text.tokenizer import load_tokenizer
from kvloom.rank.kernels.backend import Ragged
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions
from kvloom.rank.sampler import log_softmax

TYPES = (
    *("Q1_0", "Q2_0", "TQ1_0", "TQ2_0", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "Q2_K", "Q2_K_S"),
    *("IQ3_XXS", "IQ3_XS", "IQ3_S", "IQ3_M", "Q3_K_S", "Q3_K_M", "Q3_K_L", "IQ4_XS", "IQ4_NL", "Q4_0", "Q4_1"),
    *("Q4_K_S", "Q4_K_M", "MXFP4_MOE", "Q5_0", "Q5_1", "Q5_K_S", "Q5_K_M", "Q6_K", "Q8_0"),
)
WINDOW, LIMIT = 512, 1.005
_COUNTED = slice(WINDOW // 2, WINDOW - 1)  # positions whose next token counts, as llama-perplexity does it


def importance(model: Path, path: Path) -> Path:
    """A list of importance in which all columns of a matrix are equal, as llama-quantize reads it."""
    writer = gguf.GGUFWriter(path, "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["none"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", WINDOW)
    for tensor in gguf.GGUFReader(model).tensors:
        if tensor.name.endswith(".weight") and len(tensor.shape) > 1:
            writer.add_tensor(f"{tensor.name}.in_sum2", np.ones((1, int(tensor.shape[0])), np.float32))
            writer.add_tensor(f"{tensor.name}.counts", np.ones((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def theirs(binaries: Path, model: Path, words: Path, threads: int) -> float:
    """llama.cpp's perplexity."""
    command = [
        binaries / "llama-perplexity",
        "-m",
        model,
        "-f",
        words,
        "-c",
        str(WINDOW),
        "-t",
        str(threads),
        "-b",
        "512",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(re.findall(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr)[-1])


def ours(model: Path, weight_format: str, threads: int, num_windows: int) -> tuple[float, int, int]:
    """kvloom's perplexity, its bytes of weights, and how many weights there are."""
    checkpoint, tokenizer = open_checkpoint(model), load_tokenizer(model)
    config = EngineConfig(model=str(model), weight_format=weight_format)
    kept = footprint.weight_format(config, checkpoint.spec, checkpoint.weights.form)
    backend = CpuBackend(checkpoint.spec, checkpoint.weights, WINDOW // 16, CpuOptions(kept, num_threads=threads))
    ids = np.array(tokenizer.encode(text()), np.int32)
    windows = ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW)[:num_windows]
    positions, table = np.arange(WINDOW, dtype=np.int32), np.arange(WINDOW // 16, dtype=np.int32)[None]
    losses = []
    for window in windows:
        batch = Ragged(window, positions, np.array([0, WINDOW], np.int32), table)
        head = backend.step(batch, positions[_COUNTED], [0] * (WINDOW // 2 - 1))
        targets = window[WINDOW // 2 + 1 :]
        losses += [-float(log_softmax(row)[id]) for row, id in zip(head.full, targets, strict=True)]
    return math.exp(sum(losses) / len(losses)), backend.weight_bytes, footprint.num_weights(checkpoint.spec)


def report(args: argparse.Namespace, kind: str, folder: Path) -> dict[str, Any]:
    """What main prints of one type. Raises CalledProcessError when llama.cpp does not write or read such a file."""
    path, words = folder / f"{kind}.gguf", folder / "text.txt"
    options = ["--allow-requantize", "--imatrix", folder / "importance.gguf"]
    command = [args.binaries / "llama-quantize", *options, args.model, path, kind, str(args.threads)]
    subprocess.run(command, capture_output=True, text=True, check=True)
    try:
        got, num_bytes, num_weights = ours(path, args.weight_format, args.threads, args.windows)
        want = theirs(args.binaries, path, words, args.threads)
        kinds = Counter(GGUF_TYPES[info.type].name for info in read_header(path, False).tensors.values())
        bits = [round(8 * size / num_weights, 2) for size in (path.stat().st_size, num_bytes)]
    finally:
        path.unlink()
    found = {"kvloom": round(got, 4), "llama.cpp": round(want, 4), "ratio": round(got / want, 5)}
    return {"type": kind, **found, "bits": bits, "kinds": dict(kinds.most_common())}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", help="a .gguf file; the demo model by default")
    parser.add_argument("--binaries", type=Path, required=True)
    parser.add_argument("--types", type=lambda names: names.split(","), default=list(TYPES))
    parser.add_argument("--weight-format", default="stored", choices=CHOICES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--windows", type=int, default=8, help="of 512 tokens")
    args = parser.parse_args(arguments)
    args.model = args.model or pull("smollm2")
    worse = []
    with tempfile.TemporaryDirectory() as name:
        folder, tokenizer = Path(name), load_tokenizer(args.model)
        ids = tokenizer.encode(text())[: WINDOW * args.windows]
        (folder / "text.txt").write_text(tokenizer.decode(ids), encoding="utf-8")
        importance(args.model, folder / "importance.gguf")
        for kind in args.types:
            try:
                found = report(args, kind, folder)
            except subprocess.CalledProcessError as error:
                lines = f"{error.stdout}{error.stderr}".strip().splitlines() or ["no words"]
                print(json.dumps({"type": kind, "refused by": Path(error.cmd[0]).name, "because": lines[-1][:200]}))
                continue
            print(json.dumps(found), flush=True)
            worse += [kind] * (found["ratio"] > LIMIT)
    print(f"above {LIMIT} of llama.cpp's: {', '.join(worse) or 'none'}")
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
