"""The examples run as they are."""

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
    ],
)
def test_example(name, expected):
    done = subprocess.run(
        [sys.executable, FOLDER / name], capture_output=True, text=True, env=dict(os.environ), timeout=60
    )
    assert done.stderr == ""
    assert done.stdout.endswith(expected)


def test_every_example_is_run():
    assert sorted(path.name for path in FOLDER.glob("*.py")) == ["asynchronous.py", "quickstart.py"]
