"""The C++ kernels against their scalar references, under the address and undefined-behaviour sanitizers."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kvloom.engine.kernels import build

AVAILABLE = [isa for isa, (_, needed) in build.ISAS.items() if needed <= build.cpu_flags()]
FLAGS = ("-std=c++17", "-O0", "-pthread", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("isa", AVAILABLE)
def test_every_kernel_agrees_with_its_scalar_reference(isa, tmp_path):
    program = tmp_path / f"kernels_test_{isa}"
    sources = [Path(__file__).parent / "kernels_test.cpp", *(build.SOURCES / name for name in ("pack.cpp", "pool.cpp"))]
    command = ["g++", *FLAGS, *build.ISAS[isa][0], f"-I{build.SOURCES}", *map(str, sources), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    result = subprocess.run([program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    assert result.stdout.strip().endswith(f"{isa}: 0 differences")
