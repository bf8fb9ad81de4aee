"""Accuracy of the CPU backend: perplexity with a weight format, relative to the float32 reference, on the same text.

`python benches/kernels/perplexity.py model.gguf [--weight-format auto] [--kv-dtype bf16]` reads English text: the
language reference that is shipped with Python, cuts it into windows of 512 tokens, and prints one JSON line. The
float32 reference takes minutes.
"""

import argparse
import inspect
import json
import math
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

from kvloom.checkpoints import footprint
from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.demo_models import pull
from kvloom.contract.config import WEIGHT_FORMATS as CHOICES
from kvloom.contract.config import EngineConfig
from kvloom.engine.text.tokenizer import load_tokenizer
from kvloom.rank.kernels.backend import Backend, Ints, Ragged
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions
from kvloom.rank.kernels.reference import ReferenceBackend
from kvloom.rank.sampler import log_softmax

WINDOW, NUM_WINDOWS = 512, 8
TOPICS = ("typesobjects", "customization", "exceptions", "naming", "class", "with", "specialnames", "execmodel")


def text() -> str:
    return "\n\n".join(inspect.cleandoc(topics.get(topic, "")) for topic in TOPICS)


def mean_loss(backend: Backend, windows: Ints) -> float:
    """Mean negative log likelihood of all tokens but the first of each window."""
    table = np.arange(WINDOW // 16, dtype=np.int32)[None]
    pos, qstart = np.arange(WINDOW, dtype=np.int32), np.array([0, WINDOW], np.int32)
    rows = pos[:-1]
    losses = []
    for window in windows:
        head = backend.step(Ragged(window, pos, qstart, table), rows, [0] * len(rows))
        losses.append(-float(np.mean([log_softmax(row)[id] for row, id in zip(head.full, window[1:], strict=True)])))
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", help="a folder or .gguf file; the demo model by default")
    parser.add_argument("--weight-format", default="auto", choices=CHOICES)
    parser.add_argument("--kv-dtype", default="bf16")
    args = parser.parse_args()
    model = args.model or pull("smollm2")
    checkpoint = open_checkpoint(model)
    ids = load_tokenizer(model).encode(text())
    windows = np.array(ids[: WINDOW * NUM_WINDOWS], np.int32).reshape(-1, WINDOW)
    want = mean_loss(ReferenceBackend(checkpoint.spec, checkpoint.weights, WINDOW // 16), windows)
    config = EngineConfig(model=str(model), weight_format=args.weight_format)
    weight_format = footprint.weight_format(config, checkpoint.spec, checkpoint.weights.form)
    formats = {"weight_format": weight_format, "kv_dtype": args.kv_dtype}
    got = mean_loss(CpuBackend(checkpoint.spec, checkpoint.weights, WINDOW // 16, CpuOptions(**formats)), windows)
    report = {
        "bench": "perplexity", **formats, "tokens": windows.size,
        "reference": round(math.exp(want), 4), "cpu": round(math.exp(got), 4), "ratio": round(math.exp(got - want), 5),
    }  # fmt: skip
    print(json.dumps(report))


if __name__ == "__main__":
    main()
