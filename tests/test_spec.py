"""Citations of the specification name existing headings, and its tables list the server's keys and routes."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloom.server.config.keys import LAYOUT_1, keys_of
from tests.support.servers import fake_server

ROOT = Path(__file__).parent.parent
PAGES = {"server": "", "client": "", "ems": "ems", "gewu": "gewu"}  # page -> the word behind "spec" in a citation
TEXTS = {".py", ".md", ".c", ".cpp", ".h", ".hpp", ".js", ".html", ".toml", ".txt", ".json", ".service", ".socket"}

_NUMBER = r"(?:A(?:\.\d+)+|\d+(?:[.-]\d+)*)"
_NUMBERS = rf"{_NUMBER}(?:(?:, | and | to ){_NUMBER})*"
_CITATION = re.compile(rf"\b[Ss]pec (?:(ems|gewu) )?(tables? )?({_NUMBERS})")
_HEADING = re.compile(rf"^#+ (Tables? )?({_NUMBERS})\b", re.MULTILINE)
_SOURCE = re.compile(
    r"\b[s]eeds? 0\d\d\b|\bthe [s]eed's\b|\bthe [s]eed (?:says|allows|does|asks|prints|gives)\b", re.IGNORECASE
)

Section = tuple[str, bool, str]  # part, whether it is a table, number


def sections(part: str, is_table: str, numbers: str) -> Iterator[Section]:
    return ((part, bool(is_table), number) for number in re.findall(_NUMBER, numbers))


def headings() -> list[Section]:
    found: list[Section] = []
    for page, part in PAGES.items():
        for is_table, numbers in _HEADING.findall((ROOT / f"docs/spec/{page}.md").read_text()):
            found += sections(part, is_table, numbers)
    return found


def own_texts() -> Iterator[tuple[Path, str]]:
    folders = ("src", "tests", "benches", "tools", "examples", "docs", "deploy")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS]
    for path in sorted([*paths, *ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml"]):
        if not {"vendor", "golden"} & set(path.parts):
            yield path.relative_to(ROOT), path.read_text()


def test_every_citation_leads_to_a_heading():
    known, num_cited, lost = set(headings()), 0, []
    for path, text in own_texts():
        for citation in _CITATION.finditer(text):
            asked = set(sections(*citation.groups(default="")))
            num_cited += len(asked)
            lost += [f"{path}: {citation[0]}"] * bool(asked - known)
    assert lost == []
    assert num_cited > 50


def test_a_citation_names_each_of_its_sections():
    [citation] = _CITATION.finditer("as spec ems 8.2, 8.4 and 9 have it, 7 times")
    assert list(sections(*citation.groups(default=""))) == [
        ("ems", False, "8.2"),
        ("ems", False, "8.4"),
        ("ems", False, "9"),
    ]
    [citation] = _CITATION.finditer("(spec tables 2-1 to 2-6)")
    assert list(sections(*citation.groups(default=""))) == [("", True, "2-1"), ("", True, "2-6")]


def test_no_section_is_there_twice():
    found = headings()
    assert sorted(set(found)) == sorted(found)


def test_nothing_cites_another_document():
    assert [f"{path}: {found[0]}" for path, text in own_texts() for found in _SOURCE.finditer(text)] == []


@pytest.fixture(scope="module")
def server_page() -> str:
    return (ROOT / "docs/spec/server.md").read_text()


def test_the_tables_have_every_required_key_of_the_configuration(server_page: str):
    tables = server_page[server_page.index("#### Table 2-1") : server_page.index("### 2.3.2")]
    rows = set(re.findall(r"^\| `(\w+)` \|", tables, re.MULTILINE))
    names = {path.split(".")[-1]: key for path, key in keys_of(LAYOUT_1)}
    assert rows - names.keys() == set()
    assert {name for name, key in names.items() if key.is_required} - rows == set()


def test_every_route_of_the_specification_answers(server_page: str):
    asked = re.findall(r"^##### 3\.3\.2[.\d]+ (GET|POST) (\S+)$", server_page, re.MULTILINE)
    assert len(asked) > 12
    with fake_server() as server:
        paths = server.client.get("/openapi.json").json()["paths"]
    known = {(method.upper(), re.sub(r"\{\w+\}", "M", path)) for path, methods in paths.items() for method in methods}
    assert {(method, re.sub(r"\{\w+\}", "M", path)) for method, path in asked} - known == set()
