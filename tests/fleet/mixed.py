"""Many kinds of concurrent requests, the kill of a replica meanwhile, and the answer that each must get."""

import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvloom.contract.sampling import SamplingParams
from kvloom.rank.fake import fake_answer
from tests.fleet.conftest import LocalFleet

NUM_STREAMS = 32


@dataclass(frozen=True)
class Ask:
    """One request; it is greedy if it has no seed."""

    prompt: str
    num_tokens: int
    seed: int | None
    is_streamed: bool

    def of(self, fleet: LocalFleet, on_token, **more) -> str:
        body = {"max_tokens": self.num_tokens, "seed": self.seed, "temperature": 0 if self.seed is None else 1, **more}
        if self.is_streamed:
            return fleet.stream(self.prompt, on_token, **body)
        return fleet.complete(self.prompt, **body)["choices"][0]["text"]

    def truth(self) -> str:
        """The mock's answer to it."""
        return truth(self.prompt, self.seed, self.num_tokens)


def truth(prompt: str, seed: int | None, num_tokens: int = 60) -> str:
    params = SamplingParams(temperature=0 if seed is None else 1, seed=seed, ignore_eos=True)
    ids = fake_answer(list(prompt.encode()), params, seed or 0, num_tokens)
    return bytes(token for token in ids if token < 256).decode()


def mixed(name: str, draw: random.Random, max_tokens: int = 90) -> list[Ask]:
    """Short and long, whole and streamed, greedy and sampled; a quarter of them share a long beginning."""
    shared = f"{name}, a beginning of several blocks that some share " * 4
    return [
        Ask(
            (shared if number % 4 == 0 else "") + f"{name} {number} " * draw.randrange(1, 12),
            draw.randrange(max_tokens // 10, max_tokens),
            None if number % 3 == 0 else draw.randrange(1 << 31),
            number % 8 != 7,
        )
        for number in range(NUM_STREAMS)
    ]


@dataclass
class Kill:
    """Kills the process `pid` when `at` events have arrived, over all streams."""

    pid: int
    at: int
    num_events: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def on_event(self, number: int) -> None:
        with self.lock:
            self.num_events += 1
            if self.num_events == self.at:
                os.kill(self.pid, signal.SIGKILL)


def answers(fleet: LocalFleet, asks: list[Ask], kill: Kill | None = None, **more) -> list[str]:
    """Send all requests at once; their answers in the order of `asks`."""
    on_token = kill.on_event if kill else lambda number: None
    with ThreadPoolExecutor(len(asks)) as threads:
        return list(threads.map(lambda ask: ask.of(fleet, on_token, **more), asks))
