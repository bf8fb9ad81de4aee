"""A rank's own work (its turn) between the kernels of two decode steps, by kind of request.

`python -m benches.engine.turn` runs decode steps of the demo model in this process, as a rank would: a message is
decoded, the batch run, the answer encoded. One JSON line a batch size and kind, medians in microseconds a step:

  turn_us   processor time of the rank's own thread, without the library's call
  step_us   the library's call: the kernels, with their choice of tokens
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvloom.checkpoints.demo_models import pull
from kvloom.contract.config import EngineConfig
from kvloom.contract.messages import Batch, Done, NewSeq, Work
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.schedule.again import Again
from kvloom.rank.loading import open_runner
from kvloom.rank.runner import ModelRunner

CONTEXT, BLOCK = 200, 16
KINDS = {
    "greedy": SamplingParams(temperature=0),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "temperature 0.7, top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "top-k 40": SamplingParams(top_k=40),
    "greedy, frequency penalty": SamplingParams(temperature=0, frequency_penalty=0.3),
}


class Timed:
    """The library's step, which measures its time: processor time of this thread, and wall time."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.clear()

    def clear(self) -> None:
        self.own_s = self.whole_s = 0.0

    def __call__(self, *args: Any) -> Any:
        own_s, whole_s = time.thread_time(), time.perf_counter()
        result = self._function(*args)
        self.own_s += time.thread_time() - own_s
        self.whole_s += time.perf_counter() - whole_s
        return result


def orders(num_seqs: int, params: SamplingParams, num_steps: int) -> list[bytes]:
    """The engine's messages: all prompts in one step, then `num_steps` decodes."""
    width = (CONTEXT + num_steps) // BLOCK + 1
    encode = msgspec.msgpack.Encoder().encode
    new = [NewSeq(i, [(i + j) % 1000 + 3 for j in range(CONTEXT)], params, i) for i in range(num_seqs)]
    first = [Work(i, 0, CONTEXT, 0, list(range(i * width, (i + 1) * width))) for i in range(num_seqs)]
    found = [encode(Batch(new, first, []))]
    again = Again(is_taken=True)
    again.shorten(Batch([], list(first), []))
    for at in range(CONTEXT, CONTEXT + num_steps):
        batch = Batch([], [Work(i, at, 1, width, []) for i in range(num_seqs)], [])
        again.shorten(batch)
        found.append(encode(batch))
    return [*found, encode(Batch([], [], list(range(num_seqs))))]


def turns(runner: ModelRunner, steps: tuple[Timed, Timed], messages: list[bytes]) -> dict[str, float]:
    decode, encode = msgspec.msgpack.Decoder(Batch).decode, msgspec.msgpack.Encoder().encode
    found: dict[str, list[float]] = {"turn_us": [], "step_us": []}
    first, *decodes, last = messages
    runner.run(decode(first))
    for message in decodes:
        for step in steps:
            step.clear()
        started_s = time.thread_time()
        encode(Done(runner.run(decode(message))))
        found["turn_us"].append(time.thread_time() - started_s - sum(step.own_s for step in steps))
        found["step_us"].append(sum(step.whole_s for step in steps))
    runner.run(decode(last))
    return {name: round(1e6 * statistics.median(values), 1) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="a folder or .gguf file; the demo model by default")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    config = EngineConfig(
        model=str(args.model or pull("smollm2")), weight_format="stored", kv_cache_bytes=1 << 29, max_batch=32
    )
    runner = open_runner(config, [2], lambda done, total: None)
    lib = runner._backend._lib  # this bench has to look inside
    lib.kvl_step, lib.kvl_step_again = Timed(lib.kvl_step), Timed(lib.kvl_step_again)
    for num_seqs in (1, 8, 32):
        for kind, params in KINDS.items():
            values = turns(runner, (lib.kvl_step, lib.kvl_step_again), orders(num_seqs, params, args.steps))
            print(json.dumps({"bench": "turn", "num_seqs": num_seqs, "kind": kind, **values}), flush=True)


if __name__ == "__main__":
    main()
