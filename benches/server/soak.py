"""Mixed load with kills and restarts of pool, rank, server and clients: an answer is the undisturbed one, or an error.

    python -m benches.server.soak --minutes 60 --block-size 128 --kv-dtype int8

Answers are computed first by a server without a pool, one by one. Then clients ask in parallel, streamed and whole, and
sometimes hang up, while processes are killed; the KV cache is so small that prefixes are evicted and come back from the
pool all the time, and every byte of them is checked (`verifyBlocks`). JSON lines report the counts; the exit code is 1
if an answer differed, a byte was wrong, or nothing was loaded or compared, which would prove nothing.
"""

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import httpx
from tests.support.models.adapters import make_adapter

from benches.server.soak_cases import Case, Failed, ask, make_cases
from benches.server.soak_world import Settings, World
from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.demo_models import find_model

_PAUSE_S = 12.0  # mean pause between disturbances
_FIRST_PAUSES = 6  # a short soak has about this many disturbances
_RETRY_S = 0.5  # after an error, before the next request
_REPORT_S = 15.0
_SHOWN = 3  # number of different answers that are printed
_PATIENCE_S = (
    120.0  # a soak may last this much longer until something was compared and loaded: a busy machine may be slow
)


class Clients:
    """Threads that send requests until they are stopped, and their counts."""

    def __init__(self, world: World, cases: Sequence[Case], max_requests: int, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.different: list[str] = []
        self._world, self._cases, self._left = world, cases, max_requests
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, count: int) -> None:
        self._threads = [threading.Thread(target=self._run, name=f"client-{i}") for i in range(count)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop the threads; returns when every running request has been answered."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    @property
    def has_asked_enough(self) -> bool:
        return self._left <= 0

    def _run(self) -> None:
        with httpx.Client(trust_env=False) as client:
            while not self._is_over.is_set() and not self.has_asked_enough:
                client.base_url = httpx.URL(self._world.url)
                self._ask(client)

    def _ask(self, client: httpx.Client) -> None:
        with self._lock:
            self._left -= 1
            case = self._dice.choice(self._cases)
            is_streamed = case.may_stream and self._dice.random() < 0.6
            hang_up_after = self._dice.randrange(20) if is_streamed and self._dice.random() < 0.15 else None
        try:
            answer = ask(client, case, is_streamed, hang_up_after)
        except Failed as error:
            self._count(f"error: {error}")
            self._is_over.wait(_RETRY_S)
        else:
            self._judge(case, is_streamed, answer)

    def _judge(self, case: Case, is_streamed: bool, answer: object) -> None:
        if answer is None:
            self._count("hung up")
            return
        self._count("compared")
        self._count(f"compared: {case.kind}")
        if answer != case.truth:
            self._count("different")
            how = "streamed" if is_streamed else "whole"
            with self._lock:
                self.different.append(f"{case.kind}, {how}:\n  want {case.truth!r}\n  got  {answer!r}"[:2000])

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    with tempfile.TemporaryDirectory(prefix="kvloom-soak-") as name:
        folder = Path(name)
        model = find_model(options.model)
        adapter = make_adapter(folder / "adapter", open_checkpoint(model).spec.tensor_shapes(), size=0.3)
        settings = Settings(model, adapter, options.block_size, options.kv_dtype, options.kv_mb)
        cases = _with_truth(make_cases(options.cases, options.seed), settings, folder)
        with World(settings, folder, has_pool=True) as world:
            clients = Clients(world, cases, options.max_requests, options.seed)
            clients.start(options.clients)
            try:
                disturbed = _disturb(world, clients, options.minutes * 60, options.seed)
            finally:
                clients.stop()
            world.look()
        return _report(options, clients, world, disturbed)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--kv-dtype", default="auto", choices=("auto", "bf16", "int8"))
    parser.add_argument("--kv-mb", type=int, default=100, help="of the KV cache; at least 60")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--cases", type=int, default=42)
    parser.add_argument("--max-requests", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def _with_truth(cases: Sequence[Case], settings: Settings, folder: Path) -> list[Case]:
    """Each case with the answer of a server that has no other request."""
    print("the undisturbed answers", file=sys.stderr, flush=True)
    own = folder / "undisturbed"
    own.mkdir()
    with World(settings, own, has_pool=False) as world, httpx.Client(base_url=world.url, trust_env=False) as client:
        return [replace(case, truth=ask(client, case, is_streamed=False)) for case in cases]


def _disturb(world: World, clients: Clients, duration_s: float, seed: int) -> Counter[str]:
    """Disturb a process every few seconds, each kind once in random order, then again. Repairs prolong the soak."""
    dice, disturbed = random.Random(seed), Counter[str]()
    end_s, report_s = time.monotonic() + duration_s, 0.0
    pause_s = min(_PAUSE_S, duration_s / _FIRST_PAUSES)
    kinds = world.disturbances()
    waiting: list[int] = []
    while time.monotonic() < end_s and not clients.has_asked_enough:
        next_s = time.monotonic() + dice.uniform(0.3, 1.7) * pause_s
        while time.monotonic() < min(next_s, end_s):
            world.look()
            if time.monotonic() >= report_s:
                report_s = time.monotonic() + _REPORT_S
                shown = {"left_s": round(end_s - time.monotonic()), "loaded": world.num_loaded, **clients.counts}
                print(json.dumps(shown | disturbed), file=sys.stderr, flush=True)
            time.sleep(min(0.5, pause_s / 2))
        if time.monotonic() < end_s:
            waiting = waiting or dice.sample(range(len(kinds)), len(kinds))
            name, befall = kinds[waiting.pop()]
            began_s = time.monotonic()
            befall()
            end_s += time.monotonic() - began_s
            disturbed[name] += 1
    _wait_for_proof(world, clients)
    return disturbed


def _wait_for_proof(world: World, clients: Clients) -> None:
    """Wait until something was compared and loaded: on a busy machine a short soak may end before that."""
    end_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end_s and not clients.has_asked_enough:
        if clients.counts["compared"] and world.num_loaded:
            return
        world.look()
        time.sleep(0.05)


def _report(options: argparse.Namespace, clients: Clients, world: World, disturbed: Counter[str]) -> int:
    values = {
        "compared": clients.counts["compared"],
        "different": clients.counts["different"],
        "wrong_bytes": world.num_wrong,
        "loaded_blocks": world.num_loaded,
        **{name: count for name, count in sorted((clients.counts + disturbed).items()) if name != "compared"},
    }
    setting = {"minutes": options.minutes, "block_size": options.block_size, "kv_dtype": options.kv_dtype}
    for name, value in values.items():
        print(json.dumps({"bench": "soak", **setting, "name": name, "value": value, "unit": "count"}), flush=True)
    for shown in clients.different[:_SHOWN]:
        print(shown, file=sys.stderr)
    is_well = not values["different"] and not values["wrong_bytes"]
    return 0 if is_well and values["compared"] and values["loaded_blocks"] else 1


if __name__ == "__main__":
    sys.exit(main())
