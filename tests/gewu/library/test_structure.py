"""The library's C files: each uses only files below it, each function is short and says what it does."""

import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from kvloom.gewu.build import PACKAGE

FILES = sorted((PACKAGE / "c").glob("*.c"))
MAX_LINES = 60
WORD = re.compile(r"\bgewu_\w+")


def functions(file: Path) -> list[tuple[str, int, bool]]:
    """For each function: its signature, its number of lines, and whether a comment precedes it."""
    lines, found = file.read_text().splitlines(), []
    for number, line in enumerate(lines):
        if line == "{":
            first = number
            while lines[first - 1] and not lines[first - 1].endswith("*/"):
                first -= 1
            length = lines[first:].index("}") + 1
            found.append((" ".join(lines[first:number]), length, lines[first - 1].endswith("*/")))
    return found


def test_the_files_use_each_other_in_one_direction():
    owners = {
        name: file for file in FILES for signature, _, _ in functions(file) for name in WORD.findall(signature)[:1]
    }
    assert len(owners) > 30
    uses = {
        file: {owners[name] for name in WORD.findall(file.read_text()) if name in owners} - {file} for file in FILES
    }
    order = list(TopologicalSorter(uses).static_order())  # raises CycleError
    assert order[-1].name == "api.c"
    named = {file.name: {used.name for used in uses[file]} for file in FILES}
    assert named["connection.c"] == {"lock.c", "socket.c", "wire.c"}
    assert named["session.c"] == {"lock.c", "connection.c"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_each_function_is_short_and_has_a_paragraph(file):
    for signature, num_lines, has_paragraph in functions(file):
        assert num_lines <= MAX_LINES, signature
        assert has_paragraph, signature
