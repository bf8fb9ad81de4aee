"""Replicas of the real small model are killed under streams: every answer is that of an undisturbed run.

KVLOOM_FLEET_KILLS=100 makes so many kills; without it nothing is run, since a fleet of two takes half a minute.
"""

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fleet.conftest import fleet_run

NUM_KILLS = int(os.environ.get("KVLOOM_FLEET_KILLS", "0"))
NUM_STREAMS = 8
pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not NUM_KILLS, reason="starts a fleet; KVLOOM_FLEET_KILLS=100 runs it"),
]
PROMPTS = [f"{text} {number}" for number in range(4) for text in ("Once upon a time", "The capital of France is")]


def test_every_answer_is_that_of_an_undisturbed_run(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with fleet_run(str(smollm2_path), "--replicas", "2", "--cpus", "0.5", backend="auto") as fleet:
        name = fleet.feed()["name"]

        def answer(number: int, on_token=lambda event: None) -> str:
            return fleet.stream(PROMPTS[number], on_token, model=name, seed=number)

        wanted = [answer(number) for number in range(NUM_STREAMS)]
        source, num_moves = random.Random(1), 0
        for _ in range(NUM_KILLS):
            fleet.wait_replicas(2)
            victim, at = source.choice(sorted(fleet.engine_pids())), source.randrange(1, 40)

            def kill(event: int, victim: int = victim, at: int = at) -> None:
                if event == at:
                    os.kill(victim, signal.SIGKILL)

            with ThreadPoolExecutor(NUM_STREAMS) as threads:
                first = threads.submit(answer, 0, kill)
                others = list(threads.map(answer, range(1, NUM_STREAMS)))
            assert [first.result(), *others] == wanted
            num_moves = fleet.feed()["moves"]
        assert fleet.feed()["lost"] == 0
        print(f"{NUM_KILLS} kills, {num_moves} moves, {NUM_KILLS * NUM_STREAMS} answers")
