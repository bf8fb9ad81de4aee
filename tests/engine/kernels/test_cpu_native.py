"""The C++ kernels against scalar references, and whole steps against a plain forward pass, under the sanitizers."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvloom.rank.kernels import build
from tests.support.compiling import compiled, objects

AVAILABLE = [isa for isa, (_, needed) in build.ISAS.items() if needed <= build.cpu_flags()]
FLAGS = ("-std=c++17", "-pthread", "-fno-sanitize-recover=all")
MEMORY = ("-O0", "-fsanitize=address,undefined")
RACES = ("-O0", "-fsanitize=thread")
HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def build_program(program: str, isa: str, flags: Sequence[str]) -> Path:
    """A program of this folder for an instruction set, under the sanitizers, the kernels compiled in."""
    command = ["g++", *FLAGS, *flags, *build.ISAS[isa][0]]
    kernels = objects(command, sorted(build.SOURCES.glob("*.cpp")))
    return compiled([*command, f"-I{build.SOURCES}", HERE / f"{program}.cpp", *kernels], program)


def check(binary: Path, isa: str) -> None:
    """It finds no difference, and no sanitizer has a word to say."""
    result = subprocess.run([binary], capture_output=True, text=True, check=False)
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    assert result.stdout.strip().endswith(f"{isa}: 0 differences")


@pytest.mark.parametrize("isa", AVAILABLE)
def test_every_kernel_agrees_with_its_scalar_reference(isa):
    check(build_program("kernels_test", isa, MEMORY), isa)


@pytest.mark.parametrize("isa", AVAILABLE)
def test_whole_steps_agree_with_a_plain_forward_pass(isa):
    check(build_program("step_test", isa, MEMORY), isa)


def test_the_threads_of_a_step_do_not_race():
    check(build_program("step_test", AVAILABLE[0], RACES), AVAILABLE[0])
