"""A process ends the descendants that have lost their own parent."""

import subprocess
import sys

import psutil

PROGRAM = """
import subprocess, sys
from kvloom.fleet.orphans import adopt, descendants, end_all
adopt()
inner = "import subprocess; print(subprocess.Popen(['sleep', '100'], stdout=-3, stderr=-3).pid, flush=True)"
pid = int(subprocess.run([sys.executable, "-c", inner], stdout=subprocess.PIPE).stdout)
assert descendants() == [pid], descendants()
end_all(0.0)
assert descendants() == []
print(pid)
"""


def test_a_grandchild_that_lost_its_parent_is_ended():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not psutil.pid_exists(int(done.stdout))
