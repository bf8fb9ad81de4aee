"""Programs that a shell or a C++ program starts, which are replaced by forks as in forks.py.

The program asks this process for a fork, passes signals on, and exits with its status; if it is killed, so is the fork.
"""

import atexit
import contextlib
import functools
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path

from kvloom.processes.template import MAX_DESCRIPTORS, MAX_MESSAGE_BYTES
from tests.support import forks

_PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys
asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
asking.connect({where!r})
argv = [{python!r}, *{words!r}, *sys.argv[1:]]
numbers = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{{name}}")]
numbers.remove(asking.fileno())
socket.send_fds(asking, [json.dumps([argv, dict(os.environ), os.getcwd(), numbers]).encode()], numbers)
if asking.recv(32) == b"start":
    os.execv(argv[0], argv)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: asking.send(bytes([number])))
for number in numbers:
    if number > 2:
        os.close(number)
status = int(asking.recv(32))
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


def lend(path: Path, *words: str) -> Path:
    """Creates a program at `path` that runs Python with `words` (one of forks.PROGRAMS) and its own arguments."""
    path.write_text(_PROGRAM.format(python=sys.executable, where=_listening(), words=words))
    path.chmod(0o700)
    return path


@functools.cache
def _listening() -> str:
    """Accepts such programs until this process ends."""
    folder = tempfile.mkdtemp(prefix="kvloom-lent-")
    atexit.register(shutil.rmtree, folder)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{folder}/socket")
    listener.listen()
    threading.Thread(target=_serve, args=(listener,), daemon=True).start()
    return f"{folder}/socket"


def _serve(listener: socket.socket) -> None:
    while True:
        threading.Thread(target=_run, args=(listener.accept()[0],), daemon=True).start()


def _run(asking: socket.socket) -> None:
    with asking:
        message, descriptors, _, _ = socket.recv_fds(asking, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        if not message:
            return
        argv, environ, folder, numbers = json.loads(message)
        pid = forks.fork(argv, environ, folder, numbers, descriptors)
        for number in descriptors:
            os.close(number)
        asking.send(b"start" if pid is None else b"forked")
        if pid is not None:
            _follow(asking, pid)


def _follow(asking: socket.socket, pid: int) -> None:
    """Waits until one of the two processes has ended."""
    process = os.pidfd_open(pid)
    while process not in select.select([asking, process], [], [])[0]:
        said = asking.recv(1)
        signal.pidfd_send_signal(process, said[0] if said else signal.SIGKILL)
        if not said:
            break
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(process)
    with contextlib.suppress(OSError):  # it was killed
        asking.send(str(status).encode())
