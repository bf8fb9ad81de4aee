"""What limits of control groups and of a process leave of the memory."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kvloom import limits
from kvloom.limits import memory_left, memory_limit

GIB = 1 << 30


def write_group(root: Path, group: str, **values: str) -> None:
    folder = root / "sys/fs/cgroup" / group
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in values.items():
        (folder / f"memory.{name}").write_text(f"{text}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/system.slice/kvloom.service\n")
    return tmp_path


def test_without_limits_there_is_none(root):
    write_group(root, "system.slice", max="max", current="5000")
    assert memory_limit(root) == (None, 0)


def test_the_group_or_parent_with_the_least_left_counts(root):
    write_group(root, "", max="9000", current="10")
    write_group(root, "system.slice", max="6000", current="5500")
    write_group(root, "system.slice/kvloom.service", max="5000", current="1000")
    assert memory_limit(root) == (6000, 5500)


def test_a_group_is_slowed_down_above_its_high_limit(root):
    write_group(root, "system.slice/kvloom.service", max="5000", high="3000", current="1000")
    assert memory_limit(root) == (3000, 1000)


def test_files_that_were_read_and_can_go_are_not_in_use(root):
    write_group(root, "system.slice", max="5000", current="4800", stat="anon 600\ninactive_file 4000\nactive_file 9")
    assert memory_limit(root) == (5000, 800)


@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_resource_limits_of_the_process_count(kind):
    program = (
        "import resource; from kvloom.limits import available_bytes\n"
        f"resource.setrlimit(resource.{kind}, ({GIB}, {GIB}))\n"
        "print(available_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < GIB


@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_resource_limit_is_not_shared_by_the_processes_that_share_the_machine(kind):
    """Each rank of a model has such a limit of its own."""
    limit = 128 << 20
    program = (
        "import resource; from kvloom.limits import available_bytes\n"
        f"resource.setrlimit(resource.{kind}, ({limit}, {limit}))\n"
        "print(available_bytes(4), available_bytes(1 << 40), available_bytes(1, 1 << 60))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    left, of_many, of_promised = map(int, done.stdout.split())
    assert limit // 2 < left < limit
    assert (of_many, of_promised) == (0, 0)


@pytest.mark.parametrize(("limit", "used", "left"), [(None, 0, None), (3 * GIB, GIB, 2 * GIB), (GIB, 2 * GIB, 0)])
def test_what_a_group_leaves_bounds_what_is_available(limit, used, left, monkeypatch):
    monkeypatch.setattr(limits, "memory_limit", lambda: (limit, used))
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert memory_left() == left
    monkeypatch.setattr(limits, "memory_limit", lambda: (4096, 0))
    assert limits.available_bytes() == 4096
    assert limits.available_bytes(num_sharing=4, promised_bytes=24) == 1000
