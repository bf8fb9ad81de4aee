"""Whatever happens to a child of whatever kind, its end is told in the same words, and it leaves nothing behind."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from kvloom.processes import childlog, kinds
from kvloom.processes.child import Child, Kind, Template, lifeline
from tests.support.forks import ROOT
from tests.support.waiting import WAIT_S, until

ROWS = {name: kind for name, kind in vars(kinds).items() if isinstance(kind, Kind)}
KINDS = {(kind.leads_group, kind.socket): name for name, kind in ROWS.items()}.values()  # one of those that differ
FAKE = "tests.processes.fake"


@dataclass
class Made:
    """Children of one kind, each with a fake program."""

    kind: Kind
    template: Template | None

    def child(self, kind: Kind | None = None) -> Child:
        """One that is ready."""
        child = Child(kind or self.kind, "fake", template=self.template)
        child.sock.settimeout(WAIT_S)
        assert child.sock.recv(20) == b"ready"
        return child

    def dies(self, where: str) -> tuple[str, int | None]:
        """How one ended that dies by itself."""
        kind = replace(self.kind, environ={**self.kind.environ, "FAKE_DIES": where}, exit_s=WAIT_S)
        template = None if self.template is None else Template.of(kind)
        child = Child(kind, "fake", template=template)
        assert child.sock.recv(20) == b""
        found = child.reason(), child.exit_code
        child.close()
        if template is not None:
            template.close()
        return found


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return replace(ROWS[request.param], command=(sys.executable, "-m", FAKE), imports=FAKE)


@pytest.fixture(params=["started", "forked"])
def made(request: pytest.FixtureRequest, kind: Kind) -> Iterator[Made]:
    lifeline()  # which stays
    subprocess.run([sys.executable, "-m", FAKE, "0", "30"], stderr=subprocess.DEVNULL, check=False)  # as what forks it
    before = held()
    template = Template.of(kind) if request.param == "forked" else None
    yield Made(kind, template)
    if template is not None:
        template.close()
    until(lambda: held() == before)


def held() -> tuple[list[int], set[str], list[str]]:
    """What this process has: children, those of its threads that children have, open files."""
    processes = sorted(child.pid for child in psutil.Process().children())
    threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("log of")}
    return processes, threads, sorted(os.listdir("/proc/self/fd"))


def done(child: Child, order: bytes) -> None:
    child.sock.send(order)
    assert child.sock.recv(20) == b"done"


def ends_by(child: Child, number: signal.Signals) -> None:
    os.kill(child.pid, number)
    assert child.sock.recv(20) == b""
    child.kind = replace(child.kind, exit_s=WAIT_S)
    assert child.reason() == f"{child.kind.people} was killed by signal {number:d}"
    child.close()


def test_an_import_that_fails(made: Made):
    assert made.dies("at import") == (f"{made.kind.people} exited with 3", 3)


def test_a_setup_that_fails(made: Made):
    assert made.dies("in setup") == (f"{made.kind.people} exited with 4", 4)


def test_an_idle_child_is_killed(made: Made):
    ends_by(made.child(), signal.SIGKILL)


def test_a_child_dies_at_work(made: Made):
    child = made.child()
    done(child, b"work")
    ends_by(child, signal.SIGSEGV)


def test_a_child_that_is_stopped_at_work_is_ended(made: Made):
    child = made.child(replace(made.kind, exit_s=0.0))
    done(child, b"work")
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
    assert child.reason() == f"{made.kind.people} closed its connection"  # it runs
    child.close()
    assert child.exit_code == -signal.SIGKILL


def test_a_child_leads_a_group_and_takes_it_along_or_is_in_its_parents(made: Made):
    child = made.child()
    assert os.getpgid(child.pid) == (child.pid if made.kind.leads_group else os.getpgid(0))
    done(child, b"beget")
    (grandchild,) = psutil.Process(child.pid).children()
    child.kill()
    if not made.kind.leads_group:
        grandchild.kill()
    until(lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE)
    child.close()


def test_ctrl_c_is_for_the_parent(made: Made):
    child = made.child()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(child.pid, number)
    done(child, b"say")
    child.close()
    assert child.exit_code == 0


def test_a_megabyte_without_a_line_s_end_is_logged_and_stops_nobody(made: Made, caplog: pytest.LogCaptureFixture):
    child = made.child()
    done(child, b"write")
    child.close()
    lines = [record.message.removeprefix("fake: ") for record in caplog.records if record.name == childlog._OTHER]
    assert "".join(lines) == "x" * (1 << 20)
    assert max(map(len, lines)) == childlog._MAX_LINE_BYTES


def test_ten_deaths_in_a_row(made: Made):
    for _ in range(10):
        ends_by(made.child(), signal.SIGKILL)


def test_a_template_that_dies_is_started_again(kind: Kind):
    template = Template.of(kind)
    made = Made(kind, template)
    for _ in range(3):
        child = made.child()
        (pid,) = template.pids
        os.kill(pid, signal.SIGKILL)
        done(child, b"say")  # a child goes on without it
        child.close()
        assert child.exit_code == 0
    template.close()


def test_a_template_that_hangs_is_ended_and_the_child_is_started_without_it(
    kind: Kind, caplog: pytest.LogCaptureFixture
):
    template = Template.of(kind)
    made = Made(kind, template)
    made.child().close()
    (pid,) = template.pids
    template._child.sock.settimeout(0.1)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    child = made.child()
    done(child, b"say")
    child.close()
    assert not template.pids
    assert f"{kind.people} is started without its template: timed out" in caplog.text


def test_a_parent_without_descriptors_has_no_child_and_loses_none(made: Made):
    made.child().close()
    before, limit = held(), resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limit)
        highest = max(map(int, before[2]))
        while (number := stack.enter_context(open(os.devnull, "rb")).fileno()) < highest:
            pass
        full = held()
        for free in range(30):
            resource.setrlimit(resource.RLIMIT_NOFILE, (number + 1 + free, limit[1]))
            with contextlib.suppress(OSError):
                Child(made.kind, "fake", template=made.template).close()
                break
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
            until(lambda: held() == full)
    assert 3 < free < 29
    until(lambda: held() == before)


def test_a_program_that_is_not_there_costs_nothing(kind: Kind):
    lifeline()
    before = held()
    with pytest.raises(FileNotFoundError):
        Child(replace(kind, command=("/nowhere/at/all",)), "fake")
    assert held() == before


def test_a_parent_without_threads_has_no_child(made: Made, monkeypatch: pytest.MonkeyPatch):
    made.child().close()
    before = held()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as changed:
        changed.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OSError, match="can't start new thread"):
            made.child()
    assert held() == before


WITHOUT = """
import sys
from pathlib import Path
from tests.processes.test_kinds import *

told = []
for name, is_forked in (("RANK", False), ("PROBER", True)):
    kind = replace(ROWS[name], command=(sys.executable, "-m", FAKE), imports=FAKE)
    child = Made(kind, Template.of(kind) if is_forked else None).child()
    assert child.sock.fileno() > 2
    done(child, b"say")
    done(child, b"write")
    child.close()
    told.append(child.exit_code)
Path(sys.argv[1]).write_text(str(told))
"""


def test_a_parent_without_standard_streams(tmp_path: Path):
    command = [sys.executable, "-c", WITHOUT, str(tmp_path / "told")]
    subprocess.run(command, cwd=ROOT, check=True, preexec_fn=lambda: os.closerange(0, 3), timeout=WAIT_S)
    assert (tmp_path / "told").read_text() == "[0, 0]"
