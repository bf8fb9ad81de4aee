"""The wheel: what it carries, and that it runs where there is no compiler."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvloom.engine.kernels import build
from kvloom.server.api.console import FILES

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("g++") is None or shutil.which("cc") is None, reason="needs g++ and cc"),
]
AVAILABLE = [isa for isa, (_, needed) in build.ISAS.items() if needed <= build.cpu_flags()]

RUNS = """
import sys
import torch
from pathlib import Path
import kvloom
from kvloom.engine.kernels import build
from kvloom.engine.kernels.cpu import CpuBackend
from tests.engine.kernels.models import SPECS, ragged, random_weights
from kvloom.gewu import build as gewu

here = Path(sys.argv[1])
assert Path(kvloom.__file__).is_relative_to(here), kvloom.__file__
assert gewu.library().is_relative_to(here)
spec, args = SPECS["llama"], ragged([([1, 2, 3, 4, 5], 0, [3])])
for isa in sys.argv[2:]:
    assert build.library(isa).is_relative_to(here)
    backend = CpuBackend(spec, random_weights(spec), 4, num_threads=2, isa=isa)
    assert backend.isa == isa
    assert torch.isfinite(backend.step(*args)).all()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of the sources: nothing is left in the tree."""
    copy = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "-d", "out"]
    result = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    (path,) = (copy / "out").glob("*.whl")
    return path


def test_a_wheel_carries_the_libraries_of_these_sources_and_is_of_this_platform(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    libraries = {name for name in names if name.endswith(".so")}
    expected = {f"kvloom/engine/kernels/lib/{build.file_name(isa)}" for isa in build.ISAS}
    assert libraries == {*expected, "kvloom/gewu/lib/libqos.so"}
    sources = {"kvloom/engine/kernels/cpu/step.cpp", "kvloom/engine/kernels/cpu/abi.h"}  # to compile for others
    page = {f"kvloom/server/console/{name}" for name in FILES}
    assert sources | page | {"kvloom/server/docs.html"} <= set(names)
    assert not wheel.name.endswith("any.whl")


def test_an_installed_wheel_computes_without_a_compiler_on_every_instruction_set(wheel, tmp_path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(command, check=True, capture_output=True)
    environment = {
        "PATH": str(empty),
        "XDG_CACHE_HOME": str(empty),
        "PYTHONPATH": os.pathsep.join((str(site), str(ROOT))),
    }
    command = [sys.executable, "-W", "ignore", "-c", RUNS, str(site), *AVAILABLE]
    result = subprocess.run(command, env=environment, cwd=empty, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert list(empty.iterdir()) == []  # nothing was compiled into the cache
