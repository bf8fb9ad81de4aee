"""`kvloom doctor`: facts read from a fake /proc, the findings from them, and the printed lines."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvloom.machine import cli
from kvloom.machine.facts import BASE, EXTRAS, Facts, read_facts
from kvloom.machine.findings import choose, findings, lines
from kvloom.rank.kernels.build import ISAS
from tests.support.commands import run_cli
from tests.support.homeless import lose_home

GIB = 1 << 30
AVX512 = ISAS["avx512"][1]
CPUINFO = "processor\t: {n}\nmodel name\t: Fast CPU 9000\nflags\t\t: {flags}\n\n"
MEMINFO = "MemTotal:       16000000 kB\nMemAvailable:    8000000 kB\nSwapTotal:             0 kB\n"
GOOD = Facts(
    version="1.0",
    python="3.12.0",
    system="Linux 6.1, glibc 2.36",
    architecture="x86_64",
    cpu="Fast CPU 9000",
    cpu_flags=AVX512,
    num_cores=4,
    num_usable=4,
    load=0.1,
    memory_bytes=16 * GIB,
    available_bytes=8 * GIB,
    huge_pages="madvise",
    shm_bytes=GIB,
    compiler="/usr/bin/g++",
    kernels={"avx512": "/lib/x.so"},
    cache="/home/me/.cache/kvloom/packed",
    disk_free_bytes=GIB,
    demo_model="/home/me/model.gguf",
    packages=dict.fromkeys(BASE, "1"),
)


@pytest.fixture
def root(tmp_path):
    """The root of a fake machine: two cores with AVX2, version 2 of control groups, no device."""
    write(tmp_path, "proc/cpuinfo", "".join(CPUINFO.format(n=n, flags="avx2 fma f16c hypervisor") for n in range(2)))
    write(tmp_path, "proc/meminfo", MEMINFO)
    write(tmp_path, "proc/loadavg", "0.25 0.3 0.4 1/200 4242\n")
    write(tmp_path, "proc/self/cgroup", "0::/a/b\n")
    write(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    (tmp_path / "dev/shm").mkdir(parents=True)
    return tmp_path


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def told(facts: Facts) -> dict[str, str]:
    """Name -> printed line; the last one if several lines have a name."""
    return {line[5:].partition(":")[0]: line for line in lines(findings(facts))}


# -- reading


def test_a_machine_is_read_as_linux_tells_it(root):
    facts = read_facts(root, {"KVLOOM_WEIGHT_CACHE": str(root / "cache")})
    assert (facts.cpu, facts.num_cores, facts.is_virtual) == ("Fast CPU 9000", 2, True)
    assert facts.cpu_flags == {"avx2", "fma", "f16c", "hypervisor"}
    assert (facts.memory_bytes, facts.available_bytes) == (16_000_000 << 10, 8_000_000 << 10)
    assert (facts.limit_bytes, facts.quota_cores, facts.load) == (None, None, 0.25)
    assert (facts.huge_pages, facts.cuda_devices, facts.npu_devices) == ("madvise", (), ())
    assert facts.cache == str(root / "cache")


def test_the_tightest_of_the_control_groups_above_counts(root):
    for group, limit, used in (("", "9000", "10"), ("a", "5000", "1000"), ("a/b", "max", "0")):
        write(root, f"sys/fs/cgroup/{group}/memory.max", f"{limit}\n")
        write(root, f"sys/fs/cgroup/{group}/memory.current", f"{used}\n")
    write(root, "sys/fs/cgroup/a/cpu.max", "150000 100000\n")
    write(root, "sys/fs/cgroup/a/b/cpu.max", "max 100000\n")
    facts = read_facts(root, {})
    assert (facts.limit_bytes, facts.limit_used_bytes, facts.quota_cores) == (5000, 1000, 1.5)


def test_control_groups_of_version_1_are_read_too(root):
    write(root, "proc/self/cgroup", "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n")
    write(root, "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes", "7000\n")
    write(root, "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes", "70\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(root, "sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us", "50000\n")
    write(root, "sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us", "100000\n")
    write(root, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    facts = read_facts(root, {})
    assert (facts.limit_bytes, facts.limit_used_bytes, facts.quota_cores) == (7000, 70, 0.5)


def test_devices_are_counted(root):
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (root / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    for name in ("davinci0", "davinci_manager", "null"):
        write(root, f"dev/{name}", "")
    facts = read_facts(root, {})
    assert facts.cuda_devices == ("0000:01:00.0", "0000:02:00.0")
    assert facts.npu_devices == ("davinci0",)


def test_a_machine_that_tells_nothing_is_read_all_the_same(tmp_path):
    facts = read_facts(tmp_path, {"KVLOOM_WEIGHT_CACHE": "off"})
    assert (facts.cpu, facts.memory_bytes, facts.huge_pages, facts.cache) == ("", 0, "", "")
    assert list(lines(findings(facts)))


def test_a_mistake_of_the_cache_is_a_fact(root):
    facts = read_facts(root, {"KVLOOM_WEIGHT_CACHE_GB": "much"})
    assert "KVLOOM_WEIGHT_CACHE_GB" in facts.cache_problem


def test_a_user_without_a_home_is_a_fact(root, monkeypatch):
    lose_home(monkeypatch)
    facts = read_facts(root, {})
    assert facts.cache_problem == "~/.cache: this user has no home folder: set HOME or XDG_CACHE_HOME"
    assert facts.demo_model == ""


# -- judging


def test_of_a_good_machine_nothing_is_slow_and_nothing_is_missing():
    assert {line[:4] for line in told(GOOD).values()} == {"ok  "}


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"cpu_flags": frozenset({"avx2", "fma", "f16c"})}, "slow instruction set: Fast CPU 9000: AVX-512"),
        ({"cpu_flags": frozenset()}, "slow instruction set: Fast CPU 9000: neither AVX-512 nor AVX2"),
        ({"is_virtual": True}, "ok   instruction set: Fast CPU 9000, virtual: avx512"),
        ({"num_usable": 2}, "ok   cores: 2 of 4"),
        ({"quota_cores": 1.5}, "slow cores: 4 usable, but the control group has time for 1.5 of them"),
        ({"load": 3.0}, "slow load: programs want 3 cores of 4 already"),
        ({"governor": "powersave"}, 'slow clock: the governor is "powersave"'),
        ({"available_bytes": 100 << 20}, "MISS memory: 100 MiB of 16.0 GiB available: the demo model"),
        (
            {"limit_bytes": 2 * GIB, "limit_used_bytes": GIB},
            "ok   memory: 8.0 GiB of 16.0 GiB available, 2.0 GiB for the control group, 1.0 GiB of them used",
        ),
        ({"limit_bytes": GIB, "limit_used_bytes": GIB}, "MISS memory: "),
        ({"swap_bytes": GIB}, "ok   swap: 1.0 GiB"),
        ({"huge_pages": "never"}, "slow huge pages: transparent huge pages are off: echo madvise >"),
        ({"huge_pages": ""}, "slow huge pages: "),
        ({"shm_bytes": 1 << 20}, "slow shared memory: 1 MiB free in /dev/shm"),
        ({"cache_problem": "it cannot be written to"}, "slow kept weights: /home/me/.cache/kvloom/packed: it cannot"),
        ({"cache": ""}, "slow kept weights: turned off: every start packs the weights again"),
        ({"demo_model": ""}, "ok   demo model: not fetched yet"),
        ({"packages": {}}, "MISS packages: not installed: numpy, "),
        ({"cuda_devices": ("a", "b")}, "slow CUDA: 2 devices, but no torch"),
        ({"npu_devices": ("davinci0",)}, "slow NPU: 1 device, but no torch"),
    ],
)
def test_what_slows_and_what_is_missing_is_said_with_what_to_do(facts, line):
    assert any(each.startswith(line) for each in lines(findings(replace(GOOD, **facts))))


def test_a_device_with_torch_is_well():
    facts = replace(GOOD, cuda_devices=("a",), packages={**GOOD.packages, "torch": "2.13.0"})
    assert told(facts)["CUDA"] == "ok   CUDA: 1 device, torch 2.13.0"
    assert told(facts)["extras"] == "ok   extras: torch 2.13.0"


@pytest.mark.parametrize(
    ("facts", "backend", "why"),
    [
        ({}, "cpu", "the kernels for avx512 are here (/lib/x.so)"),
        ({"kernels": {}}, "cpu", "the kernels for avx512 will be compiled once, with /usr/bin/g++"),
        ({"cpu_flags": frozenset()}, "cpu", "the kernels for portable will be compiled once, with /usr/bin/g++"),
        (
            {"kernels": {}, "compiler": "", "packages": {**GOOD.packages, "torch": "2"}},
            "reference",
            "there are neither kernels for avx512 nor a C++ compiler, but torch is here",
        ),
        (
            {"kernels": {}, "compiler": ""},
            "",
            "there are neither kernels for avx512 nor a C++ compiler, nor torch",
        ),
        (
            {"cuda_devices": ("a",)},
            "cpu",
            "the kernels for avx512 are here (/lib/x.so); CUDA (--device cuda --backend torch) must be asked for",
        ),
    ],
)
def test_which_back_end_is_taken_and_why(facts, backend, why):
    found = choose(replace(GOOD, **facts))
    assert (found.backend, found.why) == (backend, why)


def test_without_any_back_end_it_says_what_to_install():
    line = told(replace(GOOD, kernels={}, compiler=""))["back end"]
    assert line.startswith("MISS back end: ")
    assert line.endswith("install g++, a wheel that carries the kernels, or torch")


# -- saying


@pytest.mark.parametrize(("facts", "status"), [(GOOD, 0), (replace(GOOD, packages={}), 1)])
def test_it_ends_with_1_when_something_is_missing(monkeypatch, facts, status):
    monkeypatch.setattr(cli, "read_facts", lambda: facts)
    result = run_cli("doctor")
    assert result.returncode == status
    assert result.stdout.splitlines() == list(lines(findings(facts)))


def test_as_json_it_says_the_same_and_the_facts(monkeypatch):
    monkeypatch.setattr(cli, "read_facts", lambda: GOOD)
    found = json.loads(run_cli("doctor", "--json").stdout)
    assert found["facts"]["num_cores"] == 4
    assert found["backend"]["backend"] == "cpu"
    assert len(found["findings"]) == len(findings(GOOD))


def test_here_it_finds_all_that_serving_needs():
    found = json.loads(run_cli("doctor", "--json").stdout)
    assert found["facts"]["num_usable"] == len(os.sched_getaffinity(0))
    assert set(BASE) <= set(found["facts"]["packages"])


def test_every_base_dependency_is_known_and_no_other():
    """The doctor's list equals the dependencies in pyproject.toml."""
    project = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    listed = project.partition("dependencies = [")[2].partition("]\n")[0]
    names = {line.strip(' ",').partition(">")[0] for line in listed.splitlines() if '"' in line}
    assert names - set(EXTRAS) == set(BASE) - set(EXTRAS)
