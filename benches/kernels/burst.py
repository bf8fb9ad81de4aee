"""The delay of a step when another process takes a core for a while at its beginning, as a server's Python does.

`python -m benches.kernels.burst` decodes 32 rows (`--rows`) in steps with and without such a burst, in turns, and
prints a JSON line a length of burst:

  step_ms, with_burst_ms   medians of a step alone, and of one beside a burst
  lost_share               the delay over the length of the burst: with two cores 0.5 if both threads share the other
                           core, 1 if both stand still until the burst is over
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benches.server.share import open_backend
from kvloom.bench.kernels import decode_step, seconds
from kvloom.contract.config import WEIGHT_FORMATS

BURSTS_MS = (0.5, 1.0, 2.0, 3.0)  # in a step of 32 streams the server and its client take about 3


@contextmanager
def burster() -> Iterator[Callable[[float], None]]:
    """Another process; the function that this gives lets it use a processor for this many seconds."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        while length := os.read(read, 16):
            end_s = time.process_time() + float(length)
            while time.process_time() < end_s:
                pass
        os._exit(0)
    os.close(read)

    def tell(length_s: float) -> None:
        os.write(write, f"{length_s:<16.6f}".encode())

    try:
        yield tell
    finally:
        os.close(write)
        os.waitpid(child, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weight-format", default="w8a8", choices=WEIGHT_FORMATS)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    with burster() as burst:  # forks, so before threads start
        backend = open_backend(options.model, options.weight_format)
        step = decode_step(backend, options.rows)

        def beside(length_ms: float) -> None:
            if length_ms:
                burst(length_ms / 1e3)
            step()

        found: dict[float, list[float]] = {length_ms: [] for length_ms in (0.0, *BURSTS_MS)}
        for _ in range(options.rounds):
            for length_ms, times in found.items():
                times.append(1e3 * seconds(lambda given=length_ms: beside(given), 1))
    alone_ms = statistics.median(found.pop(0.0))
    for length_ms, times in found.items():
        took_ms = statistics.median(times)
        row = {"step_ms": round(alone_ms, 2), "with_burst_ms": round(took_ms, 2)}
        lost = round((took_ms - alone_ms) / length_ms, 2)
        print(json.dumps({"bench": "burst", "rows": options.rows, "burst_ms": length_ms, **row, "lost_share": lost}))


if __name__ == "__main__":
    main()
