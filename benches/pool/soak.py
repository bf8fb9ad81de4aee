"""Mixed load on a cluster of pool nodes that join, leave and die: what is loaded is what was saved, or a miss.

    python -m benches.pool.soak --minutes 60

Three tenants' clients save and load blocks, and put and get values, of changing sizes, while nodes are killed, drained,
stopped and started, the control plane dies, limits change and blocks are evicted. An oracle knows every byte, which
differs between tenants. The reports of saves are compared with what another node finds. JSON lines report the counts;
the exit code is 1 if a byte or an error was wrong, too many reported blocks were not found, or nothing was compared.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benches.pool.soak_load import Clients
from benches.pool.soak_world import World

_PAUSE_S = 12.0  # mean pause between disturbances
_REPORT_S = 15.0
_SHOWN = 5
_MUST_BE_FOUND = 0.9  # of blocks that saves report as more than local; other clients evict some


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="kvloom-pool-soak-") as folder,
        World(Path(folder), options.nodes, options.seed) as world,
    ):
        clients = Clients(world, options.seed)
        clients.start(options.clients)
        try:
            disturbed = _disturb(world, clients, options.minutes * 60, options.seed)
        finally:
            clients.stop()
    return _report(options, clients, disturbed)


def _disturb(world: World, clients: Clients, duration_s: float, seed: int) -> Counter[str]:
    """Disturb the cluster every few seconds, each kind once in random order, then again."""
    dice, disturbed = random.Random(seed), Counter[str]()
    end_s, report_s = time.monotonic() + duration_s, 0.0
    kinds = world.disturbances()
    waiting: list[int] = []
    while time.monotonic() < end_s:
        next_s = time.monotonic() + dice.uniform(0.3, 1.7) * min(_PAUSE_S, duration_s / len(kinds) / 2)
        while time.monotonic() < min(next_s, end_s):
            if time.monotonic() >= report_s:
                report_s = time.monotonic() + _REPORT_S
                left_s = round(end_s - time.monotonic())
                print(json.dumps({"left_s": left_s, **clients.counts, **disturbed}), file=sys.stderr, flush=True)
            time.sleep(0.2)
        waiting = waiting or dice.sample(range(len(kinds)), len(kinds))
        name, befall = kinds[waiting.pop()]
        world.disturb(befall)
        disturbed[name] += 1
    return disturbed


def _report(options: argparse.Namespace, clients: Clients, disturbed: Counter[str]) -> int:
    counts = clients.counts
    values = {"wrong": len(clients.wrong), **dict(sorted((counts + disturbed).items()))}
    setting = {"minutes": options.minutes, "nodes": options.nodes, "clients": options.clients}
    for name, value in values.items():
        print(json.dumps({"bench": "pool_soak", **setting, "name": name, "value": value, "unit": "count"}), flush=True)
    for shown in clients.wrong[:_SHOWN]:
        print(shown, file=sys.stderr)
    expected = counts["reported"] - counts["reported, on that node only"]
    is_found = counts["reported, found from another node"] >= _MUST_BE_FOUND * expected
    was_compared = min(counts["compared"], counts["compared values"], counts["reported"]) > 0
    return 0 if not clients.wrong and is_found and was_compared else 1


if __name__ == "__main__":
    sys.exit(main())
