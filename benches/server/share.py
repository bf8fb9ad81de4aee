"""The kernels' share of a server's time: the time that they alone need for a load, over the time of the load.

`python -m benches.server.share` serves the demo model and loads its kernels in this process as well; in each round it
measures the memory's rate, the kernels' prefill and decode, and the load over HTTP with 1, 8 and 32 streams of 128 +
128 tokens, two answers a stream. One JSON line a number of streams, medians of the rounds:

  tok_s           of answers, over HTTP
  kernels_tok_s   the same, if nothing but kernels ran: prompts in steps of 512 rows, then decode steps of all streams
  share           of the two, in the same round
  decode_tok_s    between the first and the last token of the streams
  memory_share    decode_tok_s over the rate at which the memory could deliver the weights
"""

import argparse
import json
import math
import statistics
import sys

import numpy as np
import uvloop

from kvloom.bench.client import Target
from kvloom.bench.kernels import decode_step, seconds
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


def prefill_s(backend: CpuBackend, count: int) -> float:
    """The time of `count` prompts, with as many in a step as fit, in seconds."""
    random, total = np.random.default_rng(0), 0.0
    for first in range(0, count, STEP_ROWS // LENGTH):
        prompts = min(STEP_ROWS // LENGTH, count - first)
        ids = random.integers(0, backend.spec.vocab_size, prompts * LENGTH, np.int32)
        starts = np.arange(prompts + 1, dtype=np.int32) * LENGTH
        table = np.arange(prompts * LENGTH // BLOCK, dtype=np.int32).reshape(prompts, -1)
        ragged = Ragged(ids, np.tile(np.arange(LENGTH, dtype=np.int32), prompts), starts, table)
        total += seconds(
            lambda given=ragged: backend.step(given, given.qstart[1:] - 1, [0] * (len(given.qstart) - 1)), 1
        )
    return total


def one_round(backend: CpuBackend, target: Target, streams: int) -> dict[str, float]:
    load = Load(streams, 2 * streams, LENGTH, LENGTH)
    decode_s = seconds(decode_step(backend, streams), 8)
    kernels_s = prefill_s(backend, load.num_prompts) + 2 * (LENGTH - 1) * decode_s
    limit = backend.probe_bandwidth() / backend.streamed_bytes * streams
    answers, wall_s = uvloop.run(run(target, load, new_seed()))
    decode_tok_s = streams / statistics.median(answer.tpot_s for answer in answers)
    num_tokens = sum(answer.num_tokens for answer in answers)
    return {
        "tok_s": num_tokens / wall_s,
        "kernels_tok_s": num_tokens / kernels_s,
        "share": kernels_s / wall_s,
        "decode_tok_s": decode_tok_s,
        "memory_share": decode_tok_s / limit,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weight-format", default="w8a8", choices=WEIGHT_FORMATS)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    backend = open_backend(options.model, options.weight_format)
    flags = ["--port", str(PORT), "--served-model-name", "m", "--weight-format", options.weight_format]
    found: dict[int, list[dict[str, float]]] = {streams: [] for streams in options.streams}
    with ServerProcess([sys.executable, "-m", "kvloom.cli", "serve", options.model, *flags]) as server:
        target = Target(f"http://127.0.0.1:{PORT}", "m")
        server.first_answer_s(target, 300, [1000] * 16)
        for load in (filling(backend), warm_up(Load(max(options.streams), 1, LENGTH, LENGTH))):
            uvloop.run(run(target, load, new_seed()))
        for streams in options.streams:  # the first use of a page of this process's cache, too
            prefill_s(backend, 2 * streams)
            seconds(decode_step(backend, streams), 1)
        for _ in range(options.rounds):
            for streams, rounds in found.items():
                rounds.append(one_round(backend, target, streams))
    for streams, rounds in found.items():
        values = {name: round(statistics.median(each[name] for each in rounds), 3) for name in rounds[0]}
        setting = {"bench": "share", "weight_format": options.weight_format, "isa": backend.isa, "streams": streams}
        print(json.dumps({**setting, **values, "rounds": options.rounds}), flush=True)


if __name__ == "__main__":
    main()
