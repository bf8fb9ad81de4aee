"""The kernels' share of a server's time: the time that they alone need for a load, over the time of the load.

`python -m benches.server.share` serves the demo model and loads its kernels in this process as well; it computes the
steps of a load with nothing but kernels, then sends the load over HTTP, and so on in turns, with 1, 8 and 32 streams of
128 + 128 tokens, two answers a stream. One JSON line a number of streams, medians of the rounds:

  tok_s           of answers, over HTTP
  kernels_tok_s   the same, if nothing but kernels ran: prompts in steps of 512 rows, then decode steps of all streams
                  with contexts that grow by a token a step
  share           of the two; the kernels' time is the mean of before and after the load, as the machine's speed drifts
  decode_tok_s    between the first and the last token of the streams
  memory_share    decode_tok_s over the rate at which the memory could deliver the weights
"""

import argparse
import json
import math
import statistics
import sys
import time

import numpy as np
import uvloop

from kvloom.bench.client import Target
from kvloom.bench.load import Load, new_seed, run, warm_up
from kvloom.bench.process import ServerProcess
from kvloom.checkpoints import footprint
from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.demo_models import find_model
from kvloom.contract.config import WEIGHT_FORMATS, EngineConfig
from kvloom.rank.kernels.backend import Ragged
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions

PORT = 8113
LENGTH, STEP_ROWS, BLOCK = 128, 512, 16
CACHE_BYTES = 2 << 30  # the largest KV cache that a server takes by default
FILLING, ANSWER = (
    1000,
    16,
)  # tokens of a prompt and an answer of the load that fills it; a single token may have no text


def open_backend(model: str, weight_format: str) -> CpuBackend:
    """A backend with room for 32 sequences, and with the weights in the form of the server's."""
    checkpoint = open_checkpoint(find_model(model))
    config = EngineConfig(model=str(checkpoint.path), weight_format=weight_format)
    held = footprint.weight_format(config, checkpoint.spec, checkpoint.weights.form)
    return CpuBackend(checkpoint.spec, checkpoint.weights, 1024, CpuOptions(held, "bf16"))


def filling(backend: CpuBackend) -> Load:
    """A load that writes to all of the cache once, as in a server that has run for a while.

    Where the host reclaims free memory, the first use of a page costs more processor time than the server itself.
    """
    token_bytes = backend.kv_bytes / (backend.num_blocks * backend.block_size)
    return Load(4, math.ceil(CACHE_BYTES / token_bytes / FILLING), FILLING, ANSWER)


def kernels_s(backend: CpuBackend, load: Load) -> float:
    """The time that the kernels need for the load's steps, in seconds: all prompts, then every step of the answers."""
    start, random = time.perf_counter(), np.random.default_rng(0)
    for first in range(0, load.num_prompts, STEP_ROWS // LENGTH):
        _step(backend, random, min(STEP_ROWS // LENGTH, load.num_prompts - first), 0, LENGTH)
    for _ in range(load.num_prompts // load.concurrency):
        for context in range(LENGTH, 2 * LENGTH - 1):
            _step(backend, random, load.concurrency, context, 1)
    return time.perf_counter() - start


def _step(backend: CpuBackend, random: np.random.Generator, sequences: int, context: int, length: int) -> None:
    """A step of `length` tokens a sequence, which follow `context` tokens in the cache, and the likeliest next ones."""
    ids = random.integers(0, backend.spec.vocab_size, sequences * length, np.int32)
    positions = np.tile(np.arange(context, context + length, dtype=np.int32), sequences)
    starts = np.arange(sequences + 1, dtype=np.int32) * length
    table = np.arange(sequences * (2 * LENGTH // BLOCK), dtype=np.int32).reshape(sequences, -1)
    backend.step(Ragged(ids, positions, starts, table), starts[1:] - 1, [1] * sequences)


def over_http(backend: CpuBackend, target: Target, load: Load) -> dict[str, float]:
    limit = backend.probe_bandwidth() / backend.streamed_bytes * load.concurrency
    answers, wall_s = uvloop.run(run(target, load, new_seed()))
    decode_tok_s = load.concurrency / statistics.median(answer.tpot_s for answer in answers)
    num_tokens = sum(answer.num_tokens for answer in answers)
    return {
        "wall_s": wall_s,
        "tok_s": num_tokens / wall_s,
        "decode_tok_s": decode_tok_s,
        "memory_share": decode_tok_s / limit,
    }


def shared(backend: CpuBackend, target: Target, load: Load, rounds: int) -> list[dict[str, float]]:
    """The figures of each round; the kernels run before, between and after the loads."""
    found, before_s = [], kernels_s(backend, load)
    for _ in range(rounds):
        served = over_http(backend, target, load)
        after_s = kernels_s(backend, load)
        alone_s, before_s = (before_s + after_s) / 2, after_s
        share = alone_s / served.pop("wall_s")
        found.append({"kernels_tok_s": served["tok_s"] / share, "share": share, **served})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weight-format", default="w8a8", choices=WEIGHT_FORMATS)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    backend = open_backend(options.model, options.weight_format)
    flags = ["--port", str(PORT), "--served-model-name", "m", "--weight-format", options.weight_format]
    loads = {streams: Load(streams, 2 * streams, LENGTH, LENGTH) for streams in options.streams}
    with ServerProcess([sys.executable, "-m", "kvloom.cli", "serve", options.model, *flags]) as server:
        target = Target(f"http://127.0.0.1:{PORT}", "m")
        server.first_answer_s(target, 300, [1000] * 16)
        for load in (filling(backend), warm_up(Load(max(options.streams), 1, LENGTH, LENGTH))):
            uvloop.run(run(target, load, new_seed()))
        for streams, load in loads.items():
            kernels_s(backend, load)  # the first use of a page of this process's cache, too
            rounds = shared(backend, target, load, options.rounds)
            values = {name: round(statistics.median(each[name] for each in rounds), 3) for name in rounds[0]}
            setting = {"bench": "share", "weight_format": options.weight_format, "isa": backend.isa, "streams": streams}
            print(json.dumps({**setting, **values, "rounds": options.rounds}), flush=True)


if __name__ == "__main__":
    main()
