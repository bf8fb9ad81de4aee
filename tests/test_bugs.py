"""The planted bugs of `make mutants`: each still fits the code, and its tests are there."""

import ast
from dataclasses import replace
from functools import cache

import pytest
from tools.mutants import ROOT, Bug, Outcome, outcome_of, read_bugs

HUNG = Outcome("tests/a.py::test_b", hung=True)


@cache
def names_in(file: str) -> set[str]:
    """Of functions, classes and variables: a state machine's case is one of the last."""
    tree = ast.parse((ROOT / file).read_text())
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return defined | {name.id for name in ast.walk(tree) if isinstance(name, ast.Name)}


def test_every_bug_stands_in_its_file_once_and_names_its_tests():
    bugs = read_bugs([])
    assert len(bugs) > 150
    for bug in bugs:
        assert bug.tests, bug.what
        for test in bug.tests:
            file, *names = test.split("::")
            assert set(names) <= names_in(file) | {"runTest"}, f"{bug.table}: {bug.what}: {test}"


def test_a_bug_whose_text_is_gone_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path):
    table = 'what = "w"\nfile = "Makefile"\nold = "not there"\nnew = "x"\ntests = ["tests/test_bugs.py"]'
    (tmp_path / "some.toml").write_text(f"[[bug]]\n{table}\n")
    monkeypatch.setattr("tools.mutants.TABLES", tmp_path)
    with pytest.raises(SystemExit, match="stands in Makefile 0 times; write the bug anew"):
        read_bugs([])


@pytest.mark.parametrize(
    ("status", "said", "expected"),
    [
        (100, "1 passed, 3 skipped in 0.1s", Outcome("")),
        (100, "2 skipped in 0.1s", Outcome("", skipped=True)),
        (101, "FAILED tests/a.py::test_b[x y] - assert 1 == 2", Outcome("tests/a.py::test_b")),
        (101, "FAILED tests/a.py::test_b - Failed: Timeout (>60.0s) from pytest-timeout.", HUNG),
        (101, "ERROR tests/a.py::test_b - OSError", Outcome("tests/a.py::test_b")),
        (1, "FAILED tests/a.py::test_b - assert 0\n1 failed\nResourceWarning", Outcome("tests/a.py::test_b")),
        (104, "ERROR: file or directory not found: tests/a.py", None),
        (-11, "", Outcome("a crash, signal 11")),
        (None, "", Outcome("for 600 s", hung=True)),
    ],
)
def test_who_noticed_a_bug_is_read_from_how_its_tests_ended(status, said, expected):
    assert outcome_of(status, said) == expected


def test_a_test_that_hangs_has_noticed_only_bugs_that_are_seen_by_it():
    bug = Bug("table", "what", "file", "old", "new", ["tests/a.py::test_b"])
    assert not HUNG.catches(bug)
    assert HUNG.catches(replace(bug, hangs=True))
    assert Outcome("tests/a.py::test_b").catches(bug)
    assert not Outcome("").catches(replace(bug, hangs=True))
