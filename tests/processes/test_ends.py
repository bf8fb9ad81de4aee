"""A child ends with its parent, however the parent ends, and also a child that is stopped at that time."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.processes.parent import STARTS
from tests.support.forks import ROOT
from tests.support.waiting import until


@pytest.fixture(scope="module", params=["running", "stopped"])
def orphans(request: pytest.FixtureRequest) -> Iterator[dict[str, psutil.Process]]:
    """A child of each kind, whose parent was killed, while the children were running or stopped."""
    command = [sys.executable, "-m", "tests.processes.parent"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        made = {name: psutil.Process(pid) for name, pid in json.loads(parent.stdout.readline()).items()}
        if request.param == "stopped":
            for child in made.values():
                os.kill(child.pid, signal.SIGSTOP)
                until(lambda child=child: child.status() == psutil.STATUS_STOPPED)
        parent.kill()
    yield made
    for child in made.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def has_ended(child: psutil.Process) -> bool:
    try:
        return not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("kind", STARTS)
def test_no_child_outlives_its_parent(orphans: dict[str, psutil.Process], kind: str):
    until(lambda: has_ended(orphans[kind]))
