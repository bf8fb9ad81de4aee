"""The tests that docs/conformance.md names exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "conformance.md").read_text()
SHOWN = sorted(set(re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", PAGE)))


def test_there_are_some():
    assert len(SHOWN) > 50


@pytest.mark.parametrize(("file", "name"), SHOWN)
def test_each_test_that_the_page_names_exists(file: str, name: str):
    text = (ROOT / "tests" / file).read_text()
    assert not name or re.search(rf"^def {name}\(", text, re.MULTILINE)


def test_each_row_says_what_shows_it():
    rows = [
        line for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line and "| line |" not in line
    ]
    silent = [row for row in rows if row.split(" | ")[-1].strip(" |") == ""]
    assert all("Ascend" in row or "there is no such file" in row for row in silent)
