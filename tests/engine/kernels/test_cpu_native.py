"""The C++ kernels against scalar references, and whole steps against a plain forward pass, under the sanitizers."""

import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvloom.rank.kernels import build
from tests.support.compiling import compiled

# The kernels of the tile unit and of pairs are part of the AVX-512 library and of its tests.
OWN = [isa for isa in build.ISAS if isa not in (build.TILES, build.PAIRS)]
AVAILABLE = [isa for isa in OWN if build.ISAS[isa][1] <= build.cpu_flags()]
# g++ collects its garbage less often, which saves a tenth of its time.
RARELY = ("--param=ggc-min-expand=1000", "--param=ggc-min-heapsize=1000000")
FLAGS = ("-std=c++17", "-pthread", "-fno-sanitize-recover=all", *RARELY)
MEMORY, RACES = ("-fsanitize=address,undefined",), ("-fsanitize=thread",)
# Undefined behaviour ends the program by a trap: compiling the messages in takes as long as all the rest.
WORDLESS = "-fsanitize-undefined-trap-on-error"
LEVELS = {"portable": "-Og"}  # its vectors are loops; for the others, optimising takes longer than it saves
PROGRAM = Path(__file__).with_name("cpp") / "native.cpp"

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def run(tests: str, isa: str, flags: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Compiles the program for an instruction set, with additional `flags`, and runs its tests named `tests`."""
    command = ["g++", *FLAGS, *flags, LEVELS.get(isa, "-O0"), *build.ISAS[isa][0], f"-I{build.SOURCES}", PROGRAM]
    sources = [path for folder in (build.SOURCES, PROGRAM.parent) for path in sorted(folder.rglob("*.cpp"))]
    program = compiled(command, PROGRAM.stem, sources)
    return subprocess.run([program, tests], capture_output=True, text=True, check=False)


def check(tests: str, isa: str, sanitizer: Sequence[str]) -> None:
    """Checks that the tests find no difference on an instruction set and that the sanitizer reports nothing."""
    result = run(tests, isa, (*sanitizer, WORDLESS))
    if result.returncode == -signal.SIGILL:
        told = run(tests, isa, sanitizer)
        pytest.fail(f"undefined behaviour: {(told.stdout + told.stderr)[-3000:]}")
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    assert result.stdout.strip().endswith(f"{isa}: 0 differences")


@pytest.mark.parametrize("isa", AVAILABLE)
def test_every_kernel_agrees_with_its_scalar_reference(isa):
    check("kernels", isa, MEMORY)


@pytest.mark.skipif(build.best_isa(build.cpu_flags()) != build.TILES, reason="needs a tile unit")
def test_every_kernel_of_the_tile_unit_agrees_with_dot_products():
    """The AVX-512 program contains these kernels' tests and skips them where there is no tile unit."""
    check("kernels", "avx512", MEMORY)


@pytest.mark.parametrize("isa", AVAILABLE)
def test_whole_steps_agree_with_a_plain_forward_pass(isa):
    check("steps", isa, MEMORY)


def test_the_threads_of_a_step_do_not_race():
    check("threads", AVAILABLE[0], RACES)
