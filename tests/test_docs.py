"""Links between pages, and files that pages name, lead to what exists; the pages of decisions stay short."""

import re
from pathlib import Path

import pytest

from tests.test_spec import own_texts

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "tests", "benches", "tools", "examples", "deploy", "findings")
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "findings").glob("*.md")]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
MAX_DECISION_LINES = 120  # of a page; a new decision replaces sentences of its page

_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_FILE = re.compile(r"`([\w./-]+\.(?:py|c|cpp|h|hpp))`")
_NUMBERED = re.compile(r"\b[Dd]ecisions? \d|decisions/\d")  # pages have names


def anchor(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def text_of(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


def headings_of(page: Path) -> set[str]:
    return {anchor(heading) for heading in _HEADING.findall(text_of(page))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_leads_to_a_file_and_a_heading(page: Path):
    lost = []
    for link in _LINK.findall(text_of(page)):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (heading and heading not in headings_of(target)):
            lost.append(link)
    assert lost == []


def test_each_file_that_a_page_names_exists():
    """A page names a file by its path or by the end of it."""
    files = [f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    named = {(page, name) for page in PAGES for name in _FILE.findall(text_of(page)) if page.parent.name != "spec"}
    assert len(named) > 100
    lost = [
        f"{page.relative_to(ROOT)}: {name}" for page, name in named if not any(f.endswith(f"/{name}") for f in files)
    ]
    assert sorted(lost) == []


def test_an_anchor_is_made_as_on_github():
    assert anchor("No torch on the CPU path") == "no-torch-on-the-cpu-path"
    assert anchor("`kv_transfer` (EMS), a step's") == "kv_transfer-ems-a-steps"


def test_decisions_are_cited_by_the_name_of_their_page():
    assert DECISIONS
    assert [f"{path}: {found[0]}" for path, text in own_texts() for found in _NUMBERED.finditer(text)] == []


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_page_of_decisions_stays_short(page: Path):
    assert len(page.read_text().splitlines()) <= MAX_DECISION_LINES
