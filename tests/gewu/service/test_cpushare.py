"""A worker's share of the processor follows the class that it serves."""

import json
import os
import subprocess
import sys

import pytest

from kvloom.gewu.qos import Level
from kvloom.gewu.worker.cpushare import cores_for, may_lower_nice

# Serves the classes one after the other; after each prints the nice values and cores of all threads.
PROGRAM = """
import json, os, sys, threading
from kvloom.gewu.worker.cpushare import CpuShare
from kvloom.gewu.qos import Level
threading.Thread(target=threading.Event().wait, daemon=True).start()
share = CpuShare(is_able=sys.argv[1] == "able")
found = []
for level in (Level.BACKGROUND, Level.UTILITY, Level.DEFAULT, Level.BACKGROUND, Level.USER_INTERACTIVE):
    share.serve(level)
    threads = [int(name) for name in os.listdir("/proc/self/task")]
    nices = {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
    found.append([sorted(nices), sorted({len(os.sched_getaffinity(thread)) for thread in threads})])
print(json.dumps(found))
"""


def serve_classes(way: str) -> list[list[list[int]]]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, way], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("level", "cores", "found"),
    [
        (Level.BACKGROUND, {0, 1, 2, 3}, {2, 3}),
        (Level.UTILITY, {0, 1, 2}, {1, 2}),
        (Level.BACKGROUND, {5}, {5}),
        (Level.DEFAULT, {0, 1}, {0, 1}),
        (Level.USER_INTERACTIVE, {0, 1}, {0, 1}),
    ],
)
def test_low_classes_get_half_of_the_cores(level, cores, found):
    assert cores_for(level, cores) == found


def test_without_the_right_to_lower_nice_values_all_threads_change_cores():
    nice, cores = os.getpriority(os.PRIO_PROCESS, 0), len(os.sched_getaffinity(0))
    half = cores - cores // 2
    assert serve_classes("unable") == [[[nice], [n]] for n in (half, half, cores, half, cores)]


@pytest.mark.skipif(not may_lower_nice(), reason="needs CAP_SYS_NICE")
def test_with_it_all_threads_take_the_nice_value_of_the_class():
    nice, cores = os.getpriority(os.PRIO_PROCESS, 0), len(os.sched_getaffinity(0))
    assert serve_classes("able") == [[[nice + n], [cores]] for n in (10, 5, 0, 10, 0)]
