"""The wheel's contents, and that it runs where there is no compiler."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest

from ems.native.build import BLOCKS
from kvloom.engine_api.build import LIBRARY
from kvloom.pool.cluster.native.library import STREAM
from kvloom.pool.storage.native.library import INDEX
from kvloom.rank.kernels import build
from kvloom.server.dialects.operators.console import FILES
from tests.support.compiling import hasty_compiler
from tests.support.processes import serving

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
from kvloom.rank.kernels import build
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions
from tests.engine.kernels.models import SPECS, all_logits, ragged, random_weights
from kvloom.engine_api.build import LIBRARY as engine
from kvloom.gewu.build import LIBRARY as gewu

here = Path(sys.argv[1])
assert Path(kvloom.__file__).is_relative_to(here), kvloom.__file__
assert gewu.path().is_relative_to(here)
assert engine.path().is_relative_to(here)
spec, args = SPECS["llama"], ragged([([1, 2, 3, 4, 5], 0, [3])])
for isa in sys.argv[2:]:
    assert build.library(isa).is_relative_to(here)
    backend = CpuBackend(spec, random_weights(spec), 4, CpuOptions(num_threads=2, isa=isa))
    assert backend.isa == isa
    assert torch.isfinite(all_logits(backend, *args)).all()
"""


def sparing_compiler(folder: Path) -> Path:
    """A fast compiler, which copies libraries that the user's cache already has (found by sources and flags)."""
    kept = folder / "kept"
    kept.mkdir()
    for name, isa in {build.file_name(isa): isa for isa in AVAILABLE}.items():
        (kept / name).symlink_to(build.library(isa))
    for library in (LIBRARY, BLOCKS, INDEX, STREAM):
        (kept / Path(library.prebuilt).name).symlink_to(library.path())
    hasty, path = hasty_compiler(folder), folder / "sparing-g++"
    lines = (
        "#!/bin/sh",
        "for made; do :; done",
        'name=$(basename "$made")',
        "library=${name#*-}",
        "library=${library%.o}",  # of an object: the library that it belongs to
        f'if [ -e "{kept}/$name" ]; then exec cp "{kept}/$name" "$made"; fi',
        f'if [ -e "{kept}/$library" ]; then exec touch "$made"; fi',
        f'exec {hasty} "$@"\n',
    )
    path.write_text("\n".join(lines))
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy of the sources, so that the build leaves no files in the tree."""
    copy = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "-d", "out"]
    environment = {**os.environ, "CXX": str(sparing_compiler(copy))}
    result = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    (path,) = (copy / "out").glob("*.whl")
    return path


def test_a_wheel_carries_the_libraries_of_these_sources_and_is_of_this_platform(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    libraries = {name for name in names if ".so" in Path(name).name}
    expected = {f"kvloom/rank/kernels/lib/{build.file_name(isa)}" for isa in build.ISAS}
    expected |= {"kvloom/gewu/lib/libqos.so.1", "kvloom/engine_api/lib/libkvloom_engine.so.1"}
    expected |= {"ems/native/sdk/lib/libems_blocks.so", "kvloom/pool/storage/native/lib/libkvloom_pool.so"}
    expected |= {"kvloom/pool/cluster/native/lib/libkvloom_stream.so"}
    assert libraries == expected
    headers = {f"kvloom/engine_api/{path.relative_to(LIBRARY.package)}" for path in LIBRARY.include.rglob("*.h")}
    kernels = build.SOURCES.relative_to(ROOT / "src")
    # the sources, for machines that need other instruction sets
    sources = {str(kernels / path.relative_to(build.SOURCES)) for path in build.SOURCES.rglob("*") if path.is_file()}
    assert {f"{kernels}/abi.h", f"{kernels}/step/step.cpp"} <= sources
    page = {f"kvloom/server/console/{name}" for name in FILES}
    assert sources | headers | page | {"kvloom/server/docs.html"} <= set(names)
    assert not wheel.name.endswith("any.whl")


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """The folder of the installed wheel, and an environment without a compiler and with an empty cache."""
    site, empty = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("empty")
    options = ["-q", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options], check=True, capture_output=True)
    paths = os.pathsep.join((str(site), str(ROOT)))
    return site, {"PATH": str(empty), "XDG_CACHE_HOME": str(empty), "PYTHONPATH": paths}


def test_an_installed_wheel_computes_without_a_compiler_on_every_instruction_set(installed):
    site, environment = installed
    command = [sys.executable, "-W", "ignore", "-c", RUNS, str(site), *AVAILABLE]
    empty = environment["PATH"]
    result = subprocess.run(command, env=environment, cwd=empty, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert list(Path(empty).iterdir()) == []  # nothing was compiled into the cache


def test_its_doctor_finds_the_kernels_that_it_carries(installed):
    site, environment = installed
    command = [sys.executable, "-m", "kvloom.cli", "doctor", "--json"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(result.stdout)
    assert (found["facts"]["compiler"], found["backend"]["backend"]) == ("", "cpu")
    assert set(found["facts"]["kernels"]) == set(build.ISAS)
    assert all(Path(path).is_relative_to(site) for path in found["facts"]["kernels"].values())


def test_it_serves(installed):
    _, environment = installed
    with serving(
        [sys.executable, "-m", "kvloom.cli", "serve", "--backend", "fake", "--port", "0"], **environment
    ) as it:
        body = {"model": "mock", "prompt": "hi", "max_tokens": 2}
        assert httpx.post(it.url + "/v1/completions", json=body).status_code == 200


def test_its_command_has_its_own_name_so_that_pipx_and_uvx_run_it(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
    assert "kvloom = kvloom.entry:kvloom" in archive.read(name).decode().splitlines()
