"""Programs end without a traceback at Ctrl-C, whenever it comes."""

import signal
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

INTERRUPT = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
MAIN = "def main():\n    return 3\n"
PLACES = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["scripts"]
PLAIN = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # also where the tests ignore it
COMMAND = "import sys; from kvloom.entry import run; sys.exit(run('program:main'))"


def run_program(folder: Path, text: str, before: str = PLAIN) -> tuple[int, str]:
    """Exit status, and what it says on stderr."""
    (folder / "program.py").write_text(text)
    command = [sys.executable, "-c", f"import sys; sys.path.append({str(folder)!r}); {before}{COMMAND}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("text", [INTERRUPT + MAIN, MAIN.replace("return 3", "raise KeyboardInterrupt")])
def test_an_interrupt_ends_a_program_without_a_word(text, tmp_path):
    """While it is imported, and while it runs."""
    assert run_program(tmp_path, text) == (-signal.SIGINT, "")


def test_an_interrupt_that_is_ignored_stays_so(tmp_path):
    ignore = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    assert run_program(tmp_path, INTERRUPT + MAIN, ignore) == (3, "")


def test_a_program_that_runs_gets_its_interrupts(tmp_path):
    caught = "try:\n        signal.raise_signal(signal.SIGINT)\n    except KeyboardInterrupt:\n        return 4"
    assert run_program(tmp_path, f"import signal\n{MAIN.replace('return 3', caught)}") == (4, "")


@pytest.mark.parametrize("name", [name for name in PLACES if name != "mindieservice_backend_connector"])
def test_every_program_that_people_start_begins_so(name, monkeypatch):
    places = []
    monkeypatch.setattr("kvloom.entry.run", places.append)
    module, _, function = PLACES[name].partition(":")
    assert module == "kvloom.entry"
    getattr(import_module(module), function)()
    (place,) = places
    module, _, function = place.partition(":")
    assert callable(getattr(import_module(module), function))
