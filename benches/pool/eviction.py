"""Hit rates of the pool's orders of eviction on some traces: `python -m benches.pool.eviction`.

A JSON line a trace: the share of requested blocks that were found, with the pool's S3-FIFO (now), with one whose small
queue stays a tenth, and with LRU. Only keys are simulated, without an agent or memory.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from itertools import accumulate, count

from kvloom.pool.storage.evict import Lru, Order, S3Fifo

SIZE = 2048  # keys in a cache
BATCH = 16


class Tenth(S3Fifo):
    """S3-FIFO whose small queue does not adapt to misses."""

    def missed(self, key: bytes, count: int) -> None:
        """Ignore a miss."""


class Cache:
    """Keys in an order of eviction, and the counts of requested and found keys."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self.num_asked = self.num_found = 0

    def save(self, keys: list[bytes]) -> None:
        """Add the keys that are not in the cache."""
        for key in keys:
            if key in self._order:
                continue
            if len(self._order) == SIZE:
                victim = self._order.victim(lambda _key: False)
                assert victim is not None
                self._order.remove(victim)
            self._order.add(key)

    def load(self, keys: list[bytes]) -> int:
        """The length of the prefix of `keys` that is in the cache."""
        found = next((i for i, key in enumerate(keys) if key not in self._order), len(keys))
        for key in keys[:found]:
            self._order.touch(key)
        if found < len(keys):
            self._order.missed(keys[found], len(keys) - found)
        self.num_asked += len(keys)
        self.num_found += found
        return found


def writers(cache: Cache, rng: random.Random, num: int, turns: int = 40) -> None:
    """Each writer loads, once, the keys that it saved in its last turn, then saves new ones; turns in random order."""
    last: dict[int, list[bytes]] = {}
    for turn in range(turns):
        for writer in rng.sample(range(num), num):
            if turn:
                cache.load(last[writer])
            last[writer] = [b"%d %d %d" % (turn, writer, i) for i in range(BATCH)]
            cache.save(last[writer])


def zipf(cache: Cache, rng: random.Random, alpha: float, scan: int = 0, num_asked: int = 60_000) -> None:
    """Single keys by Zipf's law; after every 2,000 of them `scan` keys that come only once."""
    num, once = 10 * SIZE, count()
    weights = list(accumulate((i + 1) ** -alpha for i in range(num)))
    for i, number in enumerate(rng.choices(range(num), cum_weights=weights, k=num_asked)):
        if not cache.load([b"%d" % number]):
            cache.save([b"%d" % number])
        if i % 2000 == 0:
            cache.save([b"once %d" % next(once) for _ in range(scan)])


def loop(cache: Cache, _rng: random.Random, times: float) -> None:
    """The same keys round after round, a multiple of the size of the cache."""
    for _ in range(12):
        for number in range(int(SIZE * times)):
            if not cache.load([b"%d" % number]):
                cache.save([b"%d" % number])


def chats(cache: Cache, rng: random.Random, num: int) -> None:
    """Conversations that return and grow, and some new ones, on three system prompts."""
    live: list[tuple[int, list[bytes]]] = []
    for turn in range(4000):
        if len(live) < num or rng.random() < 0.15:
            live.append((turn, [b"system %d %d" % (rng.choice((0, 0, 0, 1, 1, 2)), i) for i in range(BATCH)]))
            if len(live) > num:
                live.pop(rng.randrange(num))
        number, keys = rng.choice(live)
        keys += [b"%d %d" % (number, len(keys) + i) for i in range(BATCH // 2)]
        cache.save(keys[cache.load(keys) :])


def changing(cache: Cache, rng: random.Random) -> None:
    """Zipf, then writers, then Zipf again."""
    zipf(cache, rng, 1.0, num_asked=20_000)
    writers(cache, rng, 64, 20)
    zipf(cache, rng, 1.0, num_asked=20_000)


TRACES: dict[str, Callable[[Cache, random.Random], None]] = {
    **{f"{num} writers": lambda c, r, num=num: writers(c, r, num) for num in (12, 64, 96)},
    **{f"zipf {alpha}": lambda c, r, alpha=alpha: zipf(c, r, alpha) for alpha in (0.8, 1.0, 1.2)},
    **{f"zipf 1.0 and scans of {n}": lambda c, r, n=n: zipf(c, r, 1.0, n) for n in (1000, 4000)},
    **{f"a loop of {times}": lambda c, r, times=times: loop(c, r, times) for times in (1.05, 1.2, 1.5)},
    **{f"{num} chats": lambda c, r, num=num: chats(c, r, num) for num in (20, 60, 200)},
    "zipf, 64 writers, zipf": changing,
}


def found(trace: str, new_order: Callable[[], Order], seeds: int) -> float:
    """The share of keys that were found, averaged over the seeds."""
    shares = []
    for seed in range(seeds):
        cache = Cache(new_order())
        TRACES[trace](cache, random.Random(seed))
        shares.append(cache.num_found / cache.num_asked)
    return round(sum(shares) / seeds, 3)


def lines(arguments: list[str] | None = None) -> Iterator[str]:
    """One JSON line for each trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args(arguments)
    for trace in TRACES:
        row = {
            name: found(trace, order, options.seeds)
            for name, order in (("now", S3Fifo), ("tenth", Tenth), ("lru", Lru))
        }
        yield json.dumps({"bench": "pool_eviction", "trace": trace, **row})


if __name__ == "__main__":
    for line in lines():
        print(line, flush=True)
