"""The planted bugs of `make mutants`: each still fits the code, and its tests exist."""

import ast
from functools import cache
from pathlib import Path

import pytest
from tools.mutants import HUNG, PROCESSES, ROOT, Bug, Outcome, Workshop, outcome_of, read_bugs

TIMED_OUT = Outcome("tests/a.py::test_b", HUNG)


@cache
def names_in(file: str) -> set[str]:
    """The names of functions, classes and variables in a file; the test case of a state machine is a variable."""
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


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """A folder with small sources, tests and tables of bugs, in place of kvloom's."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("tools.mutants.ROOT", tmp_path)
    monkeypatch.setattr("tools.mutants.TABLES", tmp_path / "bugs")
    return tmp_path


FILES = {
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-ra -p no:schemathesis'\n",
    "src/odd.py": "HAS_UNIT = True\n\n\ndef is_odd(n):\n    return n % 2 == 1\n",
    "src/odd.cpp": "bool is_odd(int n) { return n % 2 == 1; }\nint main() { return is_odd(3) ? 0 : 1; }\n",
    "tests/conftest.py": "import hypothesis\nhypothesis.settings.register_profile('unshrunk')\n",
    "tests/test_odd.py": """
import os, pathlib, subprocess
import odd, pytest

def test_in_python():
    assert odd.is_odd(3)

def test_in_cpp(tmp_path):
    source = pathlib.Path(odd.__file__).with_name("odd.cpp")
    made = subprocess.run([os.environ["CXX"], source, "-o", tmp_path / "odd"])
    if made.returncode:
        pytest.skip("there is no compiler")
    assert subprocess.run([tmp_path / "odd"]).returncode == 0

@pytest.mark.skipif(not odd.HAS_UNIT, reason="needs a unit")
def test_in_the_unit():
    assert odd.is_odd(3)

@pytest.mark.skip(reason="needs a tile")
def test_in_a_tile():
    assert odd.is_odd(3)
""",
}


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("not there", "x", r"some: the text of 'w' stands in src/odd\.py 0 times; write the bug anew"),
        ("odd", "even", r"some: the text of 'w' stands in src/odd\.py 2 times"),
    ],
)
def test_a_bug_that_cannot_be_planted_is_told(old, new, told, tree):
    (tree / "src/odd.py").write_text("def odd(n):\n    return 'odd'\n")
    row = f'what = "w"\nfile = "src/odd.py"\nold = "{old}"\nnew = "{new}"\ntests = ["tests/test_odd.py"]'
    (tree / "bugs").mkdir()
    (tree / "bugs/some.toml").write_text(f"[[bug]]\n{row}\n")
    with pytest.raises(SystemExit, match=told):
        read_bugs([])


@pytest.mark.parametrize(
    ("file", "old", "new", "test", "told"),
    [
        ("odd.py", "== 1", "== 0", "in_python", "tests/test_odd.py::test_in_python"),
        ("odd.py", "n % 2", "1 * n % 2", "in_python", "NOT CAUGHT"),
        ("odd.py", "return", "return return", "in_python", "DOES NOT COMPILE"),
        ("odd.cpp", "== 1", "== 0", "in_cpp", "tests/test_odd.py::test_in_cpp"),
        ("odd.cpp", "== 1", "== one", "in_cpp", "DOES NOT COMPILE"),
        ("odd.py", "True", "False", "in_the_unit", "NOT CAUGHT"),
        ("odd.py", "== 1", "== 0", "in_a_tile", "skipped here: needs a tile"),
    ],
)
def test_what_becomes_of_a_bug(file, old, new, test, told, tree, tmp_path_factory):
    """A test that is skipped because of the bug has not noticed it, nor has one whose source does not compile."""
    bug = Bug("some", "w", f"src/{file}", old, new, [f"tests/test_odd.py::test_{test}"])
    PROCESSES.set_forkserver_preload(["pytest", "hypothesis.stateful"])
    outcome = Workshop(tmp_path_factory.mktemp("workshop")).try_out(bug)
    assert str(outcome) == told
    assert outcome.is_caught == (told.startswith("tests/"))


@pytest.mark.parametrize(
    ("status", "said", "expected"),
    [
        (100, "1 passed, 3 skipped in 0.1s", Outcome("")),
        (100, "SKIPPED [2] tests/a.py:19: needs a\n2 skipped in 0.1s", Outcome("", skipped="needs a")),
        (100, "SKIPPED [1] tests/a.py:19: needs a\n1 passed, 1 skipped in 0.1s", Outcome("")),
        (101, "FAILED tests/a.py::test_b[x y] - assert 1 == 2", Outcome("tests/a.py::test_b")),
        (101, "FAILED tests/a.py::test_b - Failed: Timeout (>60.0s) from pytest-timeout.", TIMED_OUT),
        (101, "ERROR tests/a.py::test_b - OSError", Outcome("tests/a.py::test_b")),
        (1, "FAILED tests/a.py::test_b - assert 0\n1 failed\nResourceWarning", Outcome("tests/a.py::test_b")),
        (104, "ERROR: file or directory not found: tests/a.py", None),
        (-11, "", Outcome("a crash, signal 11")),
        (None, "", Outcome("for 600 s", HUNG)),
    ],
)
def test_who_noticed_a_bug_is_read_from_how_its_tests_ended(status, said, expected):
    assert outcome_of(status, said) == expected


def test_a_test_that_hangs_has_noticed_nothing():
    assert Outcome("tests/a.py::test_b").is_caught
    assert not TIMED_OUT.is_caught
    assert str(TIMED_OUT) == "HUNG tests/a.py::test_b"
