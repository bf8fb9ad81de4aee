"""Plant plausible bugs, one at a time, and check that the tests named beside each catch it.

`python tools/mutants.py [WORD ...]` plants those of tools/bugs/*.toml whose table, file or description has one of the
words; without words all. It prints a line for each: its duration, and the test that caught it. It names the bugs that
no test caught, and exits 1. Bugs whose tests are skipped here also without the bug are counted separately, with the
reason. A test that reaches its time limit has not caught the bug, nor has one whose source does not compile. Before the
first bug is planted, the run ends if the text of a bug does not stand in its file exactly once, or if a named test is
missing or fails without a bug.
"""

import ast
import os
import queue
import re
import shutil
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "tools" / "bugs"
PASSED, FAILED = 100, 101  # pytest's status plus a hundred; Python's own, of a process that fails earlier, is 1
WAIT_S = 30  # the limit of a test's wait for an event that a bug may prevent
TEST_S, RUN_S, FIRST_S = 180, 600, 3600  # limits of one test, of a bug's tests, and of all tests before the first bug
SHOWN = 3000  # characters of pytest's output
HUNG, REFUSED = "HUNG", "DOES NOT COMPILE"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
KEPT = ("kvloom-tests", *(f"kvloom/{name}" for name in ("ems", "engine_api", "gewu", "kernels", "models")))
# -O0: optimising takes longer than it saves in these tests.
COMPILER = '#!/bin/sh\n{name} "$@" -O0 && exit\necho "$@" >>"$0.refused"\nexit 1\n'
COMPILERS = {"CC": "cc", "CXX": "g++"}
PROCESSES = get_context("forkserver")  # its server imports once the packages that bugs cannot change
PRELOADED = ("pytest", "hypothesis.stateful", "numpy", "torch", "httpx", "starlette.applications", "uvicorn")


@dataclass(frozen=True)
class Bug:
    """`old`, which stands once in `file`, becomes `new`; then one of `tests` must fail (pytest ids, no parameters)."""

    table: str
    what: str
    file: str
    old: str
    new: str
    tests: Sequence[str]


@dataclass(frozen=True)
class Outcome:
    """`ending`: the test that failed, or how its process ended; empty if all tests passed or were skipped.

    `flaw`: why this does not count as a catch. `skipped`: the reasons if all tests were skipped.
    """

    ending: str
    flaw: str = ""
    skipped: str = ""

    @property
    def is_caught(self) -> bool:
        return bool(self.ending and not self.flaw)

    def __str__(self) -> str:
        if self.skipped:
            return f"skipped here: {self.skipped}"
        return f"{self.flaw} {self.ending}".strip() or "NOT CAUGHT"


def outcome_of(status: int | None, said: str) -> Outcome | None:
    """The outcome from pytest's exit status (None: it did not end) and output; None if it names no failed test.

    After a failed test the status may be Python's own: objects that the test left open may fail again as pytest ends.
    """
    if status == PASSED:
        lacking = re.findall(r"^SKIPPED \[\d+\] \S+: (.*)$", said, re.MULTILINE)
        return Outcome("", skipped="" if re.search(r"\d passed", said) else ", ".join(sorted(set(lacking))))
    if status is None:
        return Outcome(f"for {RUN_S} s", HUNG)
    if status < 0:
        return Outcome(f"a crash, signal {-status}")
    found = re.search(r"^(?:FAILED|ERROR) (\S+?)(?:\[.*\])?(?: - (.*))?$", said, re.MULTILINE)
    if not found:
        return None
    return Outcome(found[1], HUNG if "Timeout (>" in (found[2] or "") else "")


class Workshop:
    """A copy of sources and tests in which one bug at a time is planted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._times_s = count(1)
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, folder / name)
        shutil.copy(ROOT / "pyproject.toml", folder)
        for variable, name in COMPILERS.items():
            (folder / variable).write_text(COMPILER.format(name=name))
            (folder / variable).chmod(0o755)
        self._lend_cache()

    def _lend_cache(self) -> None:
        """Link to the user's cached libraries, named by their sources; those with a bug are written to the copy."""
        for kept in KEPT:
            own = self._folder / "cache" / kept
            own.mkdir(parents=True)
            for path in (CACHE / kept).glob("*"):
                (own / path.name).symlink_to(path)

    def try_out(self, bug: Bug) -> Outcome:
        """Plant a bug and run its tests. Raises SystemExit if no test could begin."""
        with self._planted(bug):
            if bug.file.endswith(".py") and not is_python(self._folder / bug.file):
                return Outcome("", REFUSED)
            status, said = self.run(bug.tests)
        outcome = outcome_of(status, said)
        if outcome is None:
            raise SystemExit(f"{bug.table}: {bug.what!r} is no bug that a test can fail of:\n{said[-SHOWN:]}")
        if self._refused():
            return Outcome(outcome.ending, REFUSED)
        if outcome.skipped and outcome_of(*self.run(bug.tests)) != outcome:  # skipped because of the bug
            return Outcome("")
        return outcome

    def run(self, tests: Sequence[str], limit_s: float = RUN_S) -> tuple[int | None, str]:
        """Run tests: pytest's status (None: it did not end) and its output."""
        said = self._folder / "said"
        said.write_text("")
        for path in self._refused():
            path.unlink()
        process = PROCESSES.Process(target=run_pytest, args=(self._folder, said, tests))
        process.start()
        process.join(limit_s)
        if process.exitcode is None:
            process.kill()
            return None, f"they do not end in {limit_s} s"
        return process.exitcode, said.read_text()

    def _refused(self) -> list[Path]:
        """The files by which compilers have recorded a refusal in this run."""
        return list(self._folder.glob("*.refused"))

    @contextmanager
    def _planted(self, bug: Bug) -> Iterator[None]:
        path = self._folder / bug.file
        text, before = path.read_text(), path.stat()
        path.write_text(text.replace(bug.old, bug.new))
        time_s = next(self._times_s)  # Python recognises its compiled files by size and whole seconds
        os.utime(path, (time_s, time_s))
        try:
            yield
        finally:
            path.write_text(text)
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def run_pytest(folder: Path, said: Path, arguments: Sequence[str]) -> None:
    """Run tests of a workshop on its sources, in a separate process; exits with pytest's status plus a hundred."""
    with said.open("w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    paths = [str(folder / "src"), str(folder)]
    os.chdir(folder)
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "1000"}
    os.environ |= {"KVLOOM_TEST_WAIT_S": str(WAIT_S), **{variable: str(folder / variable) for variable in COMPILERS}}
    sys.path[:0] = paths
    options = ["-x", "-p", "no:cacheprovider", "-p", "no:randomly", f"--timeout={TEST_S}"]
    options += ["--hypothesis-seed=0", "--hypothesis-profile=unshrunk"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # for modules that are already imported
    sys.exit(100 + pytest.main([*options, *arguments]))


def is_python(path: Path) -> bool:
    try:
        ast.parse(path.read_text())
    except SyntaxError:
        return False
    return True


def read_bugs(words: Sequence[str]) -> list[Bug]:
    """The bugs that match. Raises SystemExit with every bug whose text does not stand in its file exactly once."""
    bugs = [
        Bug(table.stem, **row)
        for table in sorted(TABLES.glob("*.toml"))
        for row in tomllib.loads(table.read_text())["bug"]
    ]
    wrong = []
    for bug in bugs:
        found = (ROOT / bug.file).read_text().count(bug.old)
        if found != 1 or bug.old == bug.new:
            wrong.append(
                f"{bug.table}: the text of {bug.what!r} stands in {bug.file} {found} times; write the bug anew"
            )
    if wrong:
        raise SystemExit("\n".join(wrong))
    return [bug for bug in bugs if not words or any(word in f"{bug.table} {bug.file} {bug.what}" for word in words)]


def try_all(bugs: Sequence[Bug]) -> list[Outcome]:
    """The outcome of each bug, printed as it is known. Raises SystemExit if a test fails without a bug."""
    with ExitStack() as stack:
        free: queue.SimpleQueue[Workshop] = queue.SimpleQueue()
        num_workers = os.cpu_count() or 1
        for _ in range(num_workers):
            free.put(Workshop(Path(stack.enter_context(tempfile.TemporaryDirectory()))))

        @contextmanager
        def workshop() -> Iterator[Workshop]:
            taken = free.get()
            try:
                yield taken
            finally:
                free.put(taken)

        def check(tests: Sequence[str]) -> None:
            with workshop() as unchanged:
                status, said = unchanged.run(tests, FIRST_S)
            if status != PASSED:
                raise SystemExit(f"the tests fail without a bug:\n{said[-SHOWN:]}")

        def attempt(bug: Bug) -> tuple[Outcome, float]:
            with workshop() as changed:
                began_s = time.monotonic()
                return changed.try_out(bug), time.monotonic() - began_s

        workers = stack.enter_context(ThreadPoolExecutor(num_workers))
        tests = sorted({test for bug in bugs for test in bug.tests})
        for _ in workers.map(check, filter(None, (tests[part::num_workers] for part in range(num_workers)))):
            pass
        outcomes = []
        for number, (bug, (outcome, took_s)) in enumerate(zip(bugs, workers.map(attempt, bugs), strict=True), 1):
            told = f"{number:3} of {len(bugs)} {took_s:5.1f} s  {bug.table}: {bug.what}"
            print(f"{told}  <-  {outcome}", flush=True)
            outcomes.append(outcome)
        return outcomes


def main(words: Sequence[str]) -> int:
    began_s, bugs = time.monotonic(), read_bugs(words)
    os.environ["OMP_NUM_THREADS"] = "1"  # tests/conftest.py sets it too late: torch is already imported
    PROCESSES.set_forkserver_preload([*PRELOADED])
    outcomes = try_all(bugs)
    num_caught = sum(outcome.is_caught for outcome in outcomes)
    lacking = Counter(outcome.skipped for outcome in outcomes if outcome.skipped)
    for bug, outcome in zip(bugs, outcomes, strict=True):
        if not outcome.is_caught and not outcome.skipped:
            print(f"not caught: {bug.what} ({bug.file})")
    skipped = "".join(f", the tests of {number} are skipped here: {what}" for what, number in lacking.items())
    print(f"{num_caught} of {len(bugs)} planted bugs caught in {time.monotonic() - began_s:.0f} s{skipped}")
    return 0 if bugs and num_caught + lacking.total() == len(bugs) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
