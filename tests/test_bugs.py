"""The planted bugs of `make mutants`: each still fits the code, and its tests are there."""

import ast
from functools import cache

import pytest
from tools.mutants import ROOT, read_bugs


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
