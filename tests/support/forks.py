"""kvloom's processes, forked from a template process that has imported their modules: imports take most of their start.

After `install`, a Popen of Python with one of PROGRAMS is such a fork. It is a child of the caller, as usual, with the
requested descriptors, folder, environment, limits and command line; only its modules are loaded already. Everything
else (other options of Python, variables that a process reads at its start) is started normally.
"""

import fcntl
import importlib.util
import inspect
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

from kvloom.processes.template import finish, forks, show, take_over
from kvloom.processes.template import fork as fork_from

ROOT = Path(__file__).parents[2]
# Programs that may be forked, by module, file or text, and whether they start such processes themselves.
PROGRAMS = {
    "kvloom": True,
    "kvloom.cli": True,
    "kvloom.gewu": True,
    "kvloom.server.run.daemon": True,
    "kvloom.engine_api.host": True,
    "kvloom.rank.main": False,
    "kvloom.rank.check": False,
    "kvloom.gewu.prober.main": False,
    "kvloom.gewu.worker.main": False,
    "kvloom.processes.template": False,
    "tests.processes.fake": False,
    "kvloom.server.run.parse_process": False,
    "tests.gewu.client": False,
    "from kvloom.tuning.engine_test import main; main()": True,
    str(ROOT / "examples/ems/ttft.py"): True,
}
# The modules that they import, except large ones that only some need: torch, Ray.
IMPORTED = (
    "uvloop",
    "kvloom.cli",
    "kvloom.commands",
    "kvloom.engine.engine",
    "kvloom.engine.thread",
    "kvloom.rank.fake",
    "kvloom.rank.loading",
    "kvloom.server.run.cli",
    "kvloom.server.run.main",
    "kvloom.server.run.compose",
    "kvloom.server.run.mount",
    "kvloom.server.run.parse_process",
    "kvloom.pool.cli",
    "kvloom.pool.commands.agent",
    "kvloom.gewu.cli",
    "kvloom.gewu.service.daemon",
    "kvloom.gewu.worker.main",
    "kvloom.gewu.prober.main",
)
WITH_TORCH = ("-X", "torch")  # before -m: a process that has imported torch as well

_READ_AT_START = ("PYTHON", "LD_", "OMP_", "OPENBLAS_", "MKL_", "MALLOC_", "LANG", "LC_", "TZ", "SSL_")
_COMMAND_LINE_BYTES = 4096
_ABOVE = 512  # larger than any descriptor of a test's process
_OF_GROUPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # whole groups get these; its own end comes otherwise
_USUAL = {"executable": None, "close_fds": True, "shell": False, "gid": None, "gids": None, "uid": None, "umask": -1}
_BE = "from tests.support.forks import be; be()"
_LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))


@dataclass(frozen=True, slots=True)
class Asked:
    """What a process is to run. Its descriptors are sent along and get the numbers `targets`."""

    argv: list[str]
    kind: tuple[str, ...]
    targets: list[int]
    environ: dict[str, str]
    folder: str
    limits: list[tuple[int, int]]
    cores: set[int]
    held_signals: set[int]
    begins_session: bool
    group: int
    first: Callable[[], None] | None

    @property
    def starts_others(self) -> bool:
        return PROGRAMS[_program(self.argv)]


class Template:
    """A process that forks, as seen from its parent. Any thread may use it; it ends with the parent."""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._sock, self._process = sock, process
        self._lock = threading.Lock()
        self._owner = os.getpid()
        assert sock.recv(32) == b"ready", "the process that forks has ended; it has said why"

    @property
    def is_mine(self) -> bool:
        """False in a forked child, which is not the template's parent."""
        return os.getpid() == self._owner

    def fork(self, asked: Asked, descriptors: Sequence[int]) -> int:
        """The process id of a new child of this process."""
        with self._lock:
            return fork_from(self._sock, pickle.dumps(asked), descriptors)

    def close(self) -> None:
        """Ends the template; processes forked from it keep running."""
        self._sock.close()
        if self._process is not None:
            self._process.wait()


_start = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_parameters = inspect.signature(_start)
_templates: dict[tuple[str, ...], Template] = {}
_environ: dict[str, str] = {}
_beginning = threading.Lock()


def install() -> None:
    """Takes effect from now on, until `remove`."""
    _environ.clear()
    _environ.update(os.environ)
    subprocess.Popen._execute_child = _fork_or_start  # type: ignore[attr-defined]


def remove() -> None:
    """Processes that were forked keep running."""
    subprocess.Popen._execute_child = _start  # type: ignore[attr-defined]


def end() -> None:
    """Ends the templates of this process."""
    while _templates:
        _templates.popitem()[1].close()


def is_template(pid: int) -> bool:
    """Whether this is the template of a process that was itself forked."""
    return _BE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()


def fork(
    argv: Sequence[str], environ: dict[str, str], folder: str, numbers: Sequence[int], descriptors: Sequence[int]
) -> int | None:
    """The process id of a child of this process with `descriptors` under these `numbers`; None: start it normally."""
    usual = {**_USUAL, "start_new_session": False, "process_group": -1, "preexec_fn": None}
    asked = _asked({**usual, "args": argv, "env": environ, "cwd": folder, "pass_fds": ()})
    template = None if asked is None else _template(asked.kind)
    return None if asked is None or template is None else template.fork(replace(asked, targets=[*numbers]), descriptors)


def _fork_or_start(process: Any, *given: Any, **named: Any) -> None:
    """Replaces Popen's own method, which it calls for everything out of the ordinary."""
    options = _parameters.bind(process, *given, **named).arguments
    asked = _asked(options)
    template = None if asked is None else _template(asked.kind)
    if asked is None or template is None:
        _start(process, *given, **named)
        return
    pipes = [options["p2cread"], options["c2pwrite"], options["errwrite"]]
    descriptors = [number if pipe == -1 else pipe for number, pipe in enumerate(pipes)]
    try:
        process.pid = template.fork(asked, [*descriptors, *asked.targets[3:]])
        process._child_created = True
    finally:
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        process._close_pipe_fds(*(options[name] for name in ends))


def _asked(options: dict[str, Any]) -> Asked | None:
    """The request to fork; None: start it normally."""
    words = options["args"]
    argv = [words] if isinstance(words, str | bytes | os.PathLike) else [os.fspath(word) for word in words]
    kind = WITH_TORCH if tuple(argv[1:3]) == WITH_TORCH else ()
    argv[1:3] = argv[1:3] if not kind else []
    if argv[0] != sys.executable or _program(argv) not in PROGRAMS:
        return None
    if any(options[name] != usual for name, usual in _USUAL.items()) or any(map(os.isatty, range(3))):
        return None
    environ = dict(os.environ if options["env"] is None else options["env"])
    folder = os.path.abspath(options["cwd"] or ".")
    if _read_at_start(environ) != _read_at_start(_environ) or not os.path.isdir(folder):
        return None
    return Asked(
        argv,
        kind,
        [0, 1, 2, *options["pass_fds"]],
        environ,
        folder,
        [resource.getrlimit(limit) for limit in _LIMITS],
        os.sched_getaffinity(0),
        set(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        options["start_new_session"],
        options["process_group"],
        options["preexec_fn"],
    )


def _program(argv: Sequence[str]) -> str:
    """The module, text or file on a command line of Python."""
    return "".join(argv[2:3]) if argv[1:2] in (["-m"], ["-c"]) else "".join(argv[1:2])


def _read_at_start(environ: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_READ_AT_START)}


def _template(kind: tuple[str, ...]) -> Template | None:
    """The template of this process, started on first use; None in a forked child, which could not adopt its forks."""
    with _beginning:
        if kind not in _templates:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            command = [sys.executable, "-c", _BE, str(theirs.fileno()), *kind, "-" * _COMMAND_LINE_BYTES]
            null = subprocess.DEVNULL
            with theirs:
                process = subprocess.Popen(command, cwd=ROOT, stdin=null, stdout=null, pass_fds=(theirs.fileno(),))
            _templates[kind] = Template(ours, process)
    return _templates[kind] if _templates[kind].is_mine else None


# -- the process that forks, and what is forked


def be() -> NoReturn:
    """Runs a template process. In each process forked from it, runs the requested program. It never returns."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    for name in (*IMPORTED, *(("kvloom.rank.torch_backend",) if tuple(sys.argv[2:4]) == WITH_TORCH else ())):
        import_module(name)
    signals = {number: signal.signal(number, signal.SIG_IGN) for number in _OF_GROUPS}
    asked, descriptors = _offer(sock)
    while asked.starts_others:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            theirs.close()
            with ours:
                above = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, max(_ABOVE, *asked.targets) + 1)
            _templates[()] = Template(socket.socket(fileno=above))
            break
        ours.close()
        for number in descriptors:
            os.close(number)
        asked, descriptors = _offer(theirs)
    for number, handler in signals.items():
        signal.signal(number, handler)
    _become(asked, descriptors)
    finish(lambda: _run(asked.argv))


def _offer(sock: socket.socket) -> tuple[Asked, list[int]]:
    """Forks a child for each request; returns what to run and its descriptors, in the child only. Exits when closed."""
    for message, descriptors in forks(sock):
        return pickle.loads(message), descriptors
    os._exit(0)


def _become(asked: Asked, descriptors: Sequence[int]) -> None:
    """Does what happens between fork and exec."""
    take_over(descriptors, asked.targets)
    os.chdir(asked.folder)
    os.environ.clear()
    os.environ.update(asked.environ)
    for limit, value in zip(_LIMITS, asked.limits, strict=True):
        if resource.getrlimit(limit) != value:
            resource.setrlimit(limit, value)
    os.sched_setaffinity(0, asked.cores)
    signal.pthread_sigmask(signal.SIG_SETMASK, asked.held_signals)  # the template's own are those of its first user
    if asked.begins_session:
        os.setsid()
    if asked.group >= 0:
        os.setpgid(0, asked.group)
    if asked.first is not None:
        asked.first()
    show(asked.argv)
    if asked.starts_others:
        install()


def _run(argv: Sequence[str]) -> None:
    """Runs the program as Python does."""
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    text = _program(argv)
    if argv[1] == "-m":
        spec, code = _module(text)
        vars(main).update(__spec__=spec, __file__=spec.origin, __package__=spec.parent, __loader__=spec.loader)
        sys.argv, sys.path[0] = [str(spec.origin), *argv[3:]], os.getcwd()
    elif argv[1] == "-c":
        code = compile(text, "<string>", "exec")
        sys.argv, sys.path[0] = ["-c", *argv[3:]], ""
    else:
        code = compile(Path(text).read_bytes(), text, "exec")
        vars(main).update(__file__=text)
        sys.argv, sys.path[0] = list(argv[1:]), str(Path(text).parent)
    exec(code, vars(main))


def _module(name: str) -> tuple[ModuleSpec, CodeType]:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = importlib.util.find_spec(name)
    assert spec is not None
    assert isinstance(spec.loader, InspectLoader)
    code = spec.loader.get_code(name)
    assert code is not None
    return spec, code
