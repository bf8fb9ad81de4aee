"""The C++ kernels against scalar references, and whole steps against a plain forward pass, under the sanitizers."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kvloom.rank.kernels import build
from tests.support.compiling import compiled

# The kernels of the tile unit and of pairs are in the library of AVX-512, and in its tests.
OWN = [isa for isa in build.ISAS if isa not in (build.TILES, build.PAIRS)]
AVAILABLE = [isa for isa in OWN if build.ISAS[isa][1] <= build.cpu_flags()]
FLAGS = ("-std=c++17", "-pthread", "-fno-sanitize-recover=all")
MEMORY, RACES = "-fsanitize=address,undefined", "-fsanitize=thread"
LEVELS = {"portable": "-Og"}  # its vectors are loops; others are compiled faster than what an optimiser would save
PROGRAM = Path(__file__).with_name("native.cpp")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def check(tests: str, isa: str, sanitizer: str) -> None:
    """On an instruction set they find no difference, and no sanitizer has a word to say."""
    command = ["g++", *FLAGS, sanitizer, LEVELS.get(isa, "-O0"), *build.ISAS[isa][0], f"-I{build.SOURCES}", PROGRAM]
    sources = [path for folder in (build.SOURCES, PROGRAM.parent) for path in sorted(folder.glob("*.cpp"))]
    program = compiled(command, PROGRAM.stem, sources)
    result = subprocess.run([program, tests], capture_output=True, text=True, check=False)
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    assert result.stdout.strip().endswith(f"{isa}: 0 differences")


@pytest.mark.parametrize("isa", AVAILABLE)
def test_every_kernel_agrees_with_its_scalar_reference(isa):
    check("kernels", isa, MEMORY)


@pytest.mark.parametrize("isa", AVAILABLE)
def test_whole_steps_agree_with_a_plain_forward_pass(isa):
    check("steps", isa, MEMORY)


def test_the_threads_of_a_step_do_not_race():
    check("threads", AVAILABLE[0], RACES)
