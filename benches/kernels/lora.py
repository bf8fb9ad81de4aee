"""What LoRA adapters cost: `python -m benches.kernels.lora [MODEL] [--rank 16] [--rounds 15]`.

Two JSON lines, for adapters of all linears. `decode`: steps a second of a batch of 8 at a context of about 200 without
adapters, and relative to it the same batch with 1, 2, 4 and 8 adapters, used by all rows (`*_of_8`) or every second one
(`*_of_4`), and with adapters loaded but not used (`idle`). `prefill`: the same of 1,024 tokens in one step, one prompt
with an adapter, and four prompts of 256 with one each. Rounds are interleaved; ratios are medians.
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
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions

Step = tuple[Ragged, Ints]
BATCH, STEPS, NUM_ADAPTERS = 8, 6, 8
PREFILL, PROMPTS = 1024, 4
CASES = {  # the adapter of each row
    "none": [],
    "idle": [],
    "1_adapter_of_8": [1] * 8,
    "2_adapters_of_8": [1, 2] * 4,
    "4_adapters_of_8": [1, 2, 3, 4] * 2,
    "8_adapters_of_8": [1, 2, 3, 4, 5, 6, 7, 8],
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


def prompts(backend: CpuBackend, count: int) -> Step:
    """A step of PREFILL tokens of `count` prompts."""
    random, each = np.random.default_rng(0), PREFILL // count
    table = random.permutation(np.arange(PREFILL // 16, dtype=np.int32)).reshape(count, -1)
    ids = random.integers(0, backend.spec.vocab_size, PREFILL, np.int32)
    ends = np.arange(0, PREFILL + 1, each, dtype=np.int32)
    return Ragged(ids, np.tile(np.arange(each, dtype=np.int32), count), ends, table), ends[1:] - 1


def seconds(backend: CpuBackend, args: Step, adapters: list[int], steps: int) -> float:
    batch, rows = args[0]._replace(adapters=adapters), args[1]
    tops = [0] * len(rows)
    backend.step(batch, rows, tops)
    start = time.perf_counter()
    for _ in range(steps):
        backend.step(batch, rows, tops)
    return (time.perf_counter() - start) / steps


def ratio(base: list[float], own: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(base, own, strict=True)), 3)


def decode(backends: list[CpuBackend], rounds: int) -> dict[str, float]:
    """The rates of decodes; `none` runs on the first backend, which has no adapters, the others on the second."""
    args = decode_args(backends[1], BATCH)
    took: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(rounds):
        for name, adapters in CASES.items():
            took[name].append(seconds(backends[name != "none"], args, adapters, STEPS))
    ratios = {name: ratio(took["none"], times) for name, times in took.items() if name != "none"}
    return {"none_steps_s": round(1 / statistics.median(took["none"]), 1), **ratios}


def prefill(backend: CpuBackend, rounds: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for count in (1, PROMPTS):
        args, name = prompts(backend, count), f"{count}_prompts"
        took: list[list[float]] = [[], []]
        for _ in range(rounds):
            for own, adapters in zip(took, ([], list(range(1, count + 1))), strict=True):
                own.append(seconds(backend, args, adapters, 1))
        found[f"{name}_none_tok_s"] = round(PREFILL / statistics.median(took[0]), 1)
        found[name] = ratio(*took)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--weight-format", default="w8a8")
    options = parser.parse_args()
    checkpoint = open_checkpoint(find_model(options.model))
    how = CpuOptions(options.weight_format)
    backends = [CpuBackend(checkpoint.spec, checkpoint.weights, BATCH * 16, how) for _ in range(2)]
    adapter = random_adapter(checkpoint.spec, options.rank)
    num_bytes = [backends[1].add_adapter(id, adapter) for id in range(1, NUM_ADAPTERS + 1)]
    told = {"rank": options.rank, "adapter_mb": round(num_bytes[0] / 1e6, 1)}
    print(json.dumps({"what": "decode", **told, **decode(backends, options.rounds)}), flush=True)
    print(json.dumps({"what": "prefill", **told, **prefill(backends[1], options.rounds)}))


if __name__ == "__main__":
    main()
