"""A pool of a million blocks: `python -m benches.pool.million`.

Fills a pool with 4 KiB blocks without writing their bytes, goes on saving into the full pool, reads, changes the block
size, and gives segments back. A JSON line: the longest call of each kind in milliseconds, resident bytes of the index a
block, and the seconds until the pool is closed.

A shared machine may take the processor away for a while, and neither clock shows it. So the same thread alternates with
a control that uses as much processor time but touches neither the pool nor new memory, and so meets such pauses about
as often as the calls: `longest_ms` and `calls_over_5_ms` are the calls', `control_longest_ms` and `control_over_5_ms`
the control's; what the calls have above the control is the pool's own.

Calls longer than PAUSE_S, in wall or processor time, are listed with their thread's page faults and context switches,
those with the most processor time first. One that was switched out and used little processor time waited for other
programs; page faults are the pool's own (minor: memory touched for the first time).
"""

import argparse
import gc
import hashlib
import json
import os
import resource
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

import psutil

from kvloom.pool.storage.budget import Budget
from kvloom.pool.storage.entries import Geometry, Reservation, Written
from kvloom.pool.storage.opening import PoolOptions, open_pool
from kvloom.pool.storage.pool import Pool

BATCH, BLOCK, SLAB, SEGMENT = 64, 4096, 16 << 20, 64 << 20
PAUSE_S = 0.005
MAX_PAUSES = 20  # the number of listed calls
CONTROL_BYTES = 1 << 20  # hashed in a turn of the control: about a millisecond, as a batch takes


T = TypeVar("T")


class Times:
    """The longest call of each kind, and the page faults and context switches of calls longer than PAUSE_S."""

    def __init__(self) -> None:
        self.longest_s: defaultdict[str, float] = defaultdict(float)
        self.num_calls = self.num_long = 0
        self.total_s = 0.0
        self.pauses: list[dict[str, object]] = []

    def of(self, name: str, call: Callable[[], T]) -> T:
        """Run and measure the call; its result."""
        before = resource.getrusage(resource.RUSAGE_THREAD)
        start_s, used_s = time.perf_counter(), time.thread_time()
        answer = call()
        took_s, wall_s = time.thread_time() - used_s, time.perf_counter() - start_s
        after = resource.getrusage(resource.RUSAGE_THREAD)
        self.longest_s[name] = max(self.longest_s[name], took_s)
        self.num_calls += 1
        self.total_s += took_s
        self.num_long += took_s > PAUSE_S
        if max(took_s, wall_s) > PAUSE_S:
            self.pauses.append(
                {
                    "call": name,
                    "wall_ms": round(wall_s * 1e3, 2),
                    "processor_ms": round(took_s * 1e3, 2),
                    "minor_faults": after.ru_minflt - before.ru_minflt,
                    "major_faults": after.ru_majflt - before.ru_majflt,
                    "switched_out": after.ru_nivcsw - before.ru_nivcsw,
                    "waited": after.ru_nvcsw - before.ru_nvcsw,
                }
            )
        return answer

    def worst(self) -> list[dict[str, object]]:
        """The longest pauses, by processor time."""
        return sorted(self.pauses, key=lambda each: -float(str(each["processor_ms"])))[:MAX_PAUSES]


class Control:
    """Uses as much processor time as the calls, in turns about as long as a batch."""

    def __init__(self, times: Times) -> None:
        self._calls = times
        self._data = b"c" * CONTROL_BYTES
        self.times = Times()

    def keep_up(self) -> None:
        """Run turns until the control has used as much time as the calls."""
        while self.times.total_s < self._calls.total_s:
            self.times.of("control", lambda: hashlib.sha256(self._data).digest())


def put(pool: Pool, times: Times, first: int, length: int = BLOCK) -> list[bytes]:
    """Save a batch as a session does, without its bytes."""
    keys = [os.urandom(24) + number.to_bytes(8, "big") for number in range(first, first + BATCH)]
    found = times.of("begin", lambda: pool.begin_all(keys, [length] * BATCH, [False] * BATCH))
    written = [
        Written(begun, bytes(16), keys[i - 1] if i else b"")
        for i, begun in enumerate(found)
        if isinstance(begun, Reservation)
    ]
    published = times.of("publish", lambda: pool.publish_all(written))
    blocks = [block for _status, block in published]
    times.of("unpin", lambda: pool.unpin(blocks))
    while times.of("make_room_ahead", lambda: pool.make_room_ahead(length, BATCH)):
        pass
    return keys


def use(pool: Pool, count: int) -> dict[str, object]:
    """Fill the pool and go on; the output row without its last fields."""
    times = Times()
    control, before = Control(times), psutil.Process().memory_info().rss
    last: list[list[bytes]] = []
    for first in range(0, count, BATCH):
        last = [*last[-99:], put(pool, times, first)]
        control.keep_up()
    num_blocks = pool.usage()["blocks"]
    row: dict[str, object] = {"bench": "pool_million", "blocks": num_blocks}
    row["bytes_a_block"] = round((psutil.Process().memory_info().rss - before) / num_blocks)
    for turn in range(200):
        put(pool, times, count + turn * BATCH)
        for keys in last[:10]:
            held = times.of("pin", lambda keys=keys: pool.hold_prefix(keys))
            held.release()
        control.keep_up()
    for turn in range(200):
        put(pool, times, 2 * count + turn * BATCH, 4 * BLOCK)
        control.keep_up()
    row |= {"calls": times.num_calls, "calls_over_5_ms": times.num_long, "control_over_5_ms": control.times.num_long}
    row |= {
        "longest_ms": _ms(max(times.longest_s.values())),
        "control_longest_ms": _ms(control.times.longest_s["control"]),
    }
    row["pauses"] = times.worst()
    times.of("shrink", lambda: pool.shrink(1))  # in several turns that let others in between: no pause
    return row | {f"{name}_ms": _ms(took) for name, took in times.longest_s.items()}


def _ms(took_s: float) -> float:
    return round(took_s * 1e3, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    count = parser.parse_args().blocks
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)  # as the agent sets it
    total = -(-count * BLOCK // SEGMENT) * SEGMENT
    budget = Budget(total)
    budget.set_limits("t", 0, total)
    pool = open_pool("t", PoolOptions(budget, Geometry(SEGMENT, SLAB), 0.25, "s3fifo"))
    row = use(pool, count)
    start_s = time.perf_counter()
    pool.close()
    del pool
    row["stop_s"] = round(time.perf_counter() - start_s, 3)
    print(json.dumps(row))


if __name__ == "__main__":
    main()
