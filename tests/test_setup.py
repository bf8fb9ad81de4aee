"""`make serve` installs only what serving needs, and nothing the second time."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PREPARE, THEN = "PYTHONPATH=src python3 -m kvloom.prepare &", "  && wait || { kill $! 2>/dev/null; exit 1; }"
STAMPS = (".venv/.serving", ".venv/.installed")


@pytest.fixture
def checkout(tmp_path):
    """A folder with the files that the rules of the Makefile depend on."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def commands(checkout: Path, *arguments: str) -> list[str]:
    """The commands that make would run (`make -n`)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "-n", "--no-print-directory", *arguments]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if not line.startswith("sh tools/python.sh ")]


def touch(checkout: Path, *stamps: str) -> None:
    (checkout / ".venv").mkdir(exist_ok=True)
    for stamp in stamps:
        (checkout / stamp).touch()


def test_serving_needs_no_test_and_no_torch(checkout):
    found = commands(checkout, "serve", "UV=")
    assert found == [
        f"{PREPARE} python3 -m venv .venv \\",
        "  && .venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e . \\",
        THEN,
        "touch .venv/.serving",
        ".venv/bin/kvloom serve",
    ]


def test_uv_installs_it_where_there_is_one(checkout):
    found = commands(checkout, "serve", "UV=/opt/uv")
    assert found[:2] == [
        f"{PREPARE} /opt/uv venv --allow-existing --python python3 .venv \\",
        "  && /opt/uv pip install --python .venv/bin/python -c constraints.txt -e . \\",
    ]


def test_the_second_run_serves_at_once(checkout):
    touch(checkout, ".venv/.serving")
    assert commands(checkout, "serve", "UV=") == [".venv/bin/kvloom serve"]


def test_other_dependencies_are_installed_over_the_old_ones(checkout):
    touch(checkout, *STAMPS)
    os.utime(checkout / ".venv/.serving", (1, 1))
    assert len(commands(checkout, "serve", "UV=")) == 5


@pytest.mark.parametrize("target", ["test", "check"])
def test_tests_and_checks_install_their_part_over_it(checkout, target):
    found = commands(checkout, target, "UV=")
    assert any(line.endswith("-c constraints.txt -e '.[dev]'") for line in found)
    touch(checkout, *STAMPS)
    assert not any("install" in line for line in commands(checkout, target, "UV="))


def test_what_is_downloaded_is_shown(checkout):
    assert not any("-q" in line.split() or "--quiet" in line for line in commands(checkout, "setup", "UV="))


def python_of(folder: Path, version: str, has_venv: bool) -> str:
    """A program that answers as a Python of that version."""
    path = folder / "python3"
    path.write_text(
        f"""#!/bin/sh
case "$*" in
  --version) echo "Python {version}";;
  *version_info*) test {version.replace(".", "")} -ge 311;;
  *ensurepip*) {"true" if has_venv else "false"};;
esac
"""
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("version", "has_venv", "uv", "said"),
    [
        ("3.10", True, [], "kvloom needs Python 3.11 or newer, and {} is Python 3.10: make PY=python3.11\n"),
        ("3.11", False, [], "{} cannot make environments: on Debian and Ubuntu, apt install python3-venv\n"),
        ("3.11", False, ["/opt/uv"], ""),
        ("3.12", True, [], ""),
    ],
)
def test_a_python_that_cannot_be_used_is_told_before_anything_is_made(tmp_path, version, has_venv, uv, said):
    python = python_of(tmp_path, version, has_venv)
    done = subprocess.run(["sh", ROOT / "tools/python.sh", python, *uv], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (int(bool(said)), said.format(python))


def test_what_a_start_needs_besides_packages_is_made_with_the_standard_library_alone():
    """While packages are installed: `python -S` has none."""
    script = "import runpy, sys; sys.argv = ['prepare']; import kvloom.prepare"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-S", "-c", script], env=environment, check=True, timeout=60)
