"""`make serve` installs only what serving needs, and nothing the second time."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
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
    return done.stdout.splitlines()


def touch(checkout: Path, *stamps: str) -> None:
    (checkout / ".venv").mkdir(exist_ok=True)
    for stamp in stamps:
        (checkout / stamp).touch()


def test_serving_needs_no_test_and_no_torch(checkout):
    found = commands(checkout, "serve", "UV=")
    assert found == [
        "python3 -m venv .venv",
        ".venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e .",
        "touch .venv/.serving",
        ".venv/bin/kvloom serve",
    ]


def test_uv_installs_it_where_there_is_one(checkout):
    found = commands(checkout, "serve", "UV=/opt/uv")
    assert found[:2] == [
        "/opt/uv venv --allow-existing --python python3 .venv",
        "/opt/uv pip install --python .venv/bin/python -c constraints.txt -e .",
    ]


def test_the_second_run_serves_at_once(checkout):
    touch(checkout, ".venv/.serving")
    assert commands(checkout, "serve", "UV=") == [".venv/bin/kvloom serve"]


def test_other_dependencies_are_installed_over_the_old_ones(checkout):
    touch(checkout, *STAMPS)
    os.utime(checkout / ".venv/.serving", (1, 1))
    assert len(commands(checkout, "serve", "UV=")) == 4


@pytest.mark.parametrize("target", ["test", "check"])
def test_tests_and_checks_install_their_part_over_it(checkout, target):
    found = commands(checkout, target, "UV=")
    assert any(line.endswith("-c constraints.txt -e '.[dev]'") for line in found)
    touch(checkout, *STAMPS)
    assert not any("install" in line for line in commands(checkout, target, "UV="))


def test_what_is_downloaded_is_shown(checkout):
    assert not any("-q" in line.split() or "--quiet" in line for line in commands(checkout, "setup", "UV="))
