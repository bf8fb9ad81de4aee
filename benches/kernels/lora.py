"""What LoRA adapters cost a decoding batch: `python -m benches.kernels.lora [MODEL] [--rank 16] [--rounds 15]`.

One JSON line: steps a second of a batch of 8 at a context of about 200 without any adapter, and as ratios to it the
same batch with 1 and with 4 adapters of all linears, all rows having one (`*_of_8`) or every other (`*_of_4`), and
with 4 adapters loaded and none used (`idle`). Rounds are interleaved; ratios are medians.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from kvloom.bench.kernels import decode_args
from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.demo_models import find_model
from kvloom.checkpoints.families.spec import DecoderSpec
from kvloom.checkpoints.lora import PARTS, AdapterFile, read_adapter
from kvloom.rank.kernels.backend import Ints, Ragged
from kvloom.rank.kernels.cpu import CpuBackend

BATCH, STEPS = 8, 6
CASES = {  # the adapter of each row
    "none": [],
    "idle": [],
    "1_adapter_of_8": [1] * 8,
    "4_adapters_of_8": [1, 2, 3, 4] * 2,
    "1_adapter_of_4": [1, 0] * 4,
    "4_adapters_of_4": [1, 0, 2, 0, 3, 0, 4, 0],
}


def random_adapter(spec: DecoderSpec, rank: int) -> AdapterFile:
    random, tensors = np.random.default_rng(0), {}
    for name, shape in spec.tensor_shapes().items():
        layer, _, part = name.removeprefix("layers.").partition(".")
        for module in (module for module, own in PARTS.items() if own == part):
            at = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{at}.lora_A.weight"] = 0.01 * random.standard_normal((rank, shape[1]), np.float32)
            tensors[f"{at}.lora_B.weight"] = 0.01 * random.standard_normal((shape[0], rank), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
        (Path(folder) / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, Path(folder) / "adapter_model.safetensors")
        return read_adapter(Path(folder), spec.tensor_shapes())


def seconds(backend: CpuBackend, args: tuple[Ragged, Ints], adapters: list[int]) -> float:
    batch, rows = args[0]._replace(adapters=adapters), args[1]
    tops = [0] * len(rows)
    backend.step(batch, rows, tops)
    start = time.perf_counter()
    for _ in range(STEPS):
        backend.step(batch, rows, tops)
    return (time.perf_counter() - start) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    checkpoint = open_checkpoint(find_model(options.model))
    backends = [CpuBackend(checkpoint.spec, checkpoint.weights, BATCH * 16) for _ in range(2)]
    num_bytes = sum(backends[1].add_adapter(id, random_adapter(checkpoint.spec, options.rank)) for id in range(1, 5))
    args = decode_args(backends[1], BATCH)
    took: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(options.rounds):
        for name, adapters in CASES.items():
            took[name].append(seconds(backends[name != "none"], args, adapters))
    ratios = {
        name: round(statistics.median(base / own for base, own in zip(took["none"], times, strict=True)), 3)
        for name, times in took.items()
        if name != "none"
    }
    rate = round(1 / statistics.median(took["none"]), 1)
    print(json.dumps({"rank": options.rank, "adapter_mb": num_bytes // 4 >> 20, "none_steps_s": rate, **ratios}))


if __name__ == "__main__":
    main()
