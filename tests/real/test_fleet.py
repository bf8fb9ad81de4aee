"""Replicas of the real small model are killed under streams: every answer is that of an undisturbed run.

KVLOOM_FLEET_KILLS=100 makes this many kills; without it these tests are skipped, since a fleet of two takes half a
minute.
"""

import os
import random
from pathlib import Path

import pytest

from tests.fleet.conftest import fleet_run
from tests.fleet.mixed import Kill, answers, mixed

NUM_KILLS = int(os.environ.get("KVLOOM_FLEET_KILLS", "0"))
pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not NUM_KILLS, reason="starts a fleet; KVLOOM_FLEET_KILLS=100 runs it"),
]


def test_every_answer_is_that_of_an_undisturbed_run(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    draw, num_answers = random.Random(), 0
    with fleet_run(str(smollm2_path), "--replicas", "2", "--cpus", "0.5", backend="auto") as fleet:
        name = fleet.feed()["name"]
        asks = mixed("Once upon a time there was a number,", random.Random(1), max_tokens=40)
        undisturbed = Kill(0, at=-1)
        wanted = answers(fleet, asks, undisturbed, model=name)
        for _ in range(NUM_KILLS):
            fleet.wait_replicas(2)
            kill = Kill(draw.choice(sorted(fleet.engine_pids())), at=draw.randrange(1, undisturbed.num_events * 2 // 3))
            assert answers(fleet, asks, kill, model=name) == wanted
            assert kill.num_events >= kill.at
            num_answers += len(asks)
        num_moves = fleet.feed()["moves"]
        assert num_moves > 0
        assert fleet.feed()["lost"] == 0
        print(f"{NUM_KILLS} kills, {num_moves} moves, {num_answers} answers")
