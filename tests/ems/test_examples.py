"""The examples run unchanged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "ems"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("quickstart.py", "saved 2 of 2 blocks, loaded 2\nan unknown block: 0 of 1\n"),
        ("asynchronous.py", "EMS_INVALID_ARGUMENT - tonken_ids: unknown argument\n"),
        ("values.py", "got 16 of 32 chunks; the others are untouched\nof another length: [False]\n"),
    ],
)
def test_example(name, expected):
    done = subprocess.run(
        [sys.executable, FOLDER / name], capture_output=True, text=True, env=dict(os.environ), timeout=60
    )
    assert done.stderr == ""
    assert done.stdout.endswith(expected)


def test_every_example_is_run():
    assert sorted(path.name for path in FOLDER.glob("*.py")) == [
        "asynchronous.py",
        "quickstart.py",
        "ttft.py",
        "values.py",
    ]


@pytest.mark.real
@pytest.mark.timeout(600)
def test_the_first_token_comes_from_the_pool_after_a_restart(tiny_path, tmp_path):
    command = [sys.executable, FOLDER / "ttft.py", str(tiny_path), "--tokens=100", "--rounds=1"]
    done = subprocess.run([*command, f"--plot={tmp_path / 'ttft.png'}"], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    *rows, last = done.stdout.splitlines()
    found = {row["phase"]: row["num_cached_tokens"] for row in map(json.loads, rows)}
    assert found == {"cold": 0, "warm in the engine": 99, "warm from EMS": 96}
    has_plot = last.startswith("plot: ")
    assert has_plot == (tmp_path / "ttft.png").exists()
    assert has_plot or last == "no plot: matplotlib is not installed (pip install 'kvloom[plot]')"
