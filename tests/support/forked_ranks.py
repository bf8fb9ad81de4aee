"""Ranks forked from a process that has loaded torch, which takes a rank longer than all that a test asks of it.

`program()` is the command line of a rank: it hands what it was given to that process, and ends as the rank does.
"""

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

_SOCKET = "socket:"  # before the number of the one that leads to the server, see rankargs.py
_PARENT = 6  # which argument of a rank is its parent's process id


@functools.cache
def program() -> tuple[str, ...]:
    """The process is started for the first who asks, and ends with this one."""
    folder = tempfile.TemporaryDirectory(prefix="kvloom-forks-")
    where = str(Path(folder.name) / "socket")
    command = [sys.executable, "-m", "tests.support.forked_ranks", where]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()

    def end() -> None:
        process.communicate()
        folder.cleanup()

    atexit.register(end)
    return (sys.executable, "-I", "-S", __file__, "--ask", where)


def _ask(where: str, argv: Sequence[str]) -> int:
    """The exit status of the rank."""
    own = next(int(word.removeprefix(_SOCKET)) for word in argv if word.startswith(_SOCKET))
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(where)
        given = json.dumps([own, argv, dict(os.environ)]).encode()
        socket.send_fds(asking, [len(given).to_bytes(4, "big")], [own, sys.stderr.fileno()])
        asking.sendall(given)
        os.close(own)
        return int(asking.recv(4) or b"1")


def _serve(where: str) -> None:
    """Until standard input ends."""
    import_module("kvloom.rank.torch_backend")
    import_module("kvloom.rank.loading")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a rank here
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(where)
        listener.listen()
        print("listening", flush=True)
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            asked, _ = listener.accept()
            if os.fork() == 0:
                os._exit(_become_rank(asked))
            asked.close()


def _become_rank(asked: socket.socket) -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, descriptors, _, _ = socket.recv_fds(asked, 4, 2)
    given = asked.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
    own, argv, environment = json.loads(given)
    answering = os.dup(asked.fileno()) if asked.fileno() == own else asked.fileno()
    os.dup2(descriptors[1], 2)
    os.dup2(descriptors[0], own)
    os.set_inheritable(own, False)
    os.environ.clear()
    os.environ.update(environment)
    argv[_PARENT] = str(os.getppid())
    sys.argv[1:] = argv
    status = 1
    with contextlib.suppress(SystemExit):
        import_module("kvloom.rank.main").main()
        status = 0
    os.write(answering, b"%d" % status)
    return status


if __name__ == "__main__":
    if sys.argv[1] == "--ask":
        sys.exit(_ask(sys.argv[2], sys.argv[3:]))
    _serve(sys.argv[1])
