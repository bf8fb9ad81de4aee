"""Accuracy of the CPU backend: perplexity of a weight format over that of the float32 reference, on the same text.

`python benches/perplexity.py model.gguf [--weight-format w8a8] [--kv-dtype bf16]` reads English: the Python language
reference that is shipped with Python, cuts it into windows of 512 tokens, and prints one JSON line. The reference takes
minutes.
"""

import argparse
import inspect
import json
import math
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch.nn import functional as F

from kvloom.engine.hub import pull
from kvloom.engine.kernels.backend import Backend, Ragged
from kvloom.engine.kernels.cpu import CpuBackend
from kvloom.engine.kernels.reference import ReferenceBackend
from kvloom.engine.tokenizer import load_tokenizer
from kvloom.engine.weights.checkpoint import open_checkpoint

WINDOW, NUM_WINDOWS = 512, 8
TOPICS = ("typesobjects", "customization", "exceptions", "naming", "class", "with", "specialnames", "execmodel")


def text() -> str:
    return "\n\n".join(inspect.cleandoc(topics.get(topic, "")) for topic in TOPICS)


def mean_loss(backend: Backend, windows: torch.Tensor) -> float:
    """Mean negative log likelihood of each window's tokens after its first."""
    table = torch.arange(WINDOW // 16, dtype=torch.int32)[None]
    pos, qstart = torch.arange(WINDOW, dtype=torch.int32), torch.tensor([0, WINDOW], dtype=torch.int32)
    losses = [
        F.cross_entropy(backend.step(Ragged(window.int(), pos, qstart, table), pos[:-1]), window[1:]).item()
        for window in windows
    ]
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", help="a folder or .gguf file; the demo model by default")
    parser.add_argument("--weight-format", default="w8a8")
    parser.add_argument("--kv-dtype", default="bf16")
    args = parser.parse_args()
    model = args.model or pull("smollm2")
    checkpoint = open_checkpoint(model)
    ids = load_tokenizer(model).encode(text())
    windows = torch.tensor(ids[: WINDOW * NUM_WINDOWS]).view(-1, WINDOW)
    want = mean_loss(ReferenceBackend(checkpoint.spec, checkpoint.weights, WINDOW // 16), windows)
    formats = {"weight_format": args.weight_format, "kv_dtype": args.kv_dtype}
    got = mean_loss(CpuBackend(checkpoint.spec, checkpoint.weights, WINDOW // 16, **formats), windows)
    report = {
        "bench": "perplexity", **formats, "tokens": windows.numel(),
        "reference": round(math.exp(want), 4), "cpu": round(math.exp(got), 4), "ratio": round(math.exp(got - want), 5),
    }  # fmt: skip
    print(json.dumps(report))


if __name__ == "__main__":
    main()
