"""The C++ kernels against scalar references, and whole steps against a plain forward pass, under the sanitizers."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kvloom.engine.kernels import build

AVAILABLE = [isa for isa, (_, needed) in build.ISAS.items() if needed <= build.cpu_flags()]
FLAGS = ("-std=c++17", "-pthread", "-fno-sanitize-recover=all")
MEMORY = ("-O0", "-fsanitize=address,undefined")
RACES = ("-O1", "-fsanitize=thread")
HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def run(program: str, sources: list[str], isa: str, flags: tuple[str, ...], folder: Path) -> None:
    """Compiles tests and sources, runs them, and wants no difference and no word from a sanitizer."""
    binary = folder / program
    paths = [HERE / f"{program}.cpp", *(build.SOURCES / name for name in sources)]
    command = ["g++", *FLAGS, *flags, *build.ISAS[isa][0], f"-I{build.SOURCES}", *map(str, paths), "-o", str(binary)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    result = subprocess.run([binary], capture_output=True, text=True, check=False)
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    assert result.stdout.strip().endswith(f"{isa}: 0 differences")


@pytest.mark.parametrize("isa", AVAILABLE)
def test_every_kernel_agrees_with_its_scalar_reference(isa, tmp_path):
    run("kernels_test", [path.name for path in build.SOURCES.glob("*.cpp")], isa, MEMORY, tmp_path)


@pytest.mark.parametrize("isa", AVAILABLE)
def test_whole_steps_agree_with_a_plain_forward_pass(isa, tmp_path):
    run("step_test", [path.name for path in build.SOURCES.glob("*.cpp")], isa, MEMORY, tmp_path)


def test_the_threads_of_a_step_do_not_race(tmp_path):
    run("step_test", [path.name for path in build.SOURCES.glob("*.cpp")], AVAILABLE[0], RACES, tmp_path)
