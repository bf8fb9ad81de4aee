"""The prober: `python -m kvloom.gewu.prober.main FD` opens and examines model files for the daemon.

The files are untrusted. Here they cost neither the daemon's time nor its memory, and this process can be killed.
"""

import os
import resource
import socket
import sys
from contextlib import suppress

import msgspec

from kvloom.gewu.codes import Code, Refused, shown
from kvloom.gewu.modelfiles import MAX_FILES, ModelFiles, open_files
from kvloom.gewu.prober.capabilities import only_those_of
from kvloom.gewu.prober.probe import Found, probe
from kvloom.processes import childlog, inside

MAX_MESSAGE_BYTES = 128 << 10
_MAX_BYTES = 512 << 20  # bytes of address space, of which Python and its libraries take 100 to 300 MiB


class Question(msgspec.Struct, array_like=True):
    """Sent together with a descriptor of the path."""

    pid: int  # process id of the app
    backend: str  # a backend of EngineConfig


class Answer(msgspec.Struct, array_like=True):
    """If a model was found, the descriptors of its files come with it, in the order of `names`."""

    found: Found | None
    names: list[bytes] = []  # as the file system has them, which need not be UTF-8
    code: Code = Code.OK
    reason: str = ""


def look(question: Question, fd: int) -> tuple[Answer, list[int]]:
    """The answer, and the descriptors that go with it, which the caller closes."""
    try:
        with only_those_of(question.pid):
            files = open_files(fd)
    except Refused as refused:
        return Answer(None, code=refused.code, reason=str(refused)), []
    answer = _judge(files, question.backend)
    if answer.found is None:
        files.close()
    return answer, list(files.fds.values())


def _judge(files: ModelFiles, backend: str) -> Answer:
    try:
        return Answer(probe(files, backend), list(map(os.fsencode, files.fds)))
    except Refused as refused:
        return Answer(None, code=refused.code, reason=str(refused))
    except Exception as error:  # files may hold anything: whatever goes wrong, the app gets its answer
        why = f"{files.path} cannot be read: {type(error).__name__}: {error!s:.200}"
        return Answer(None, code=Code.FAULT, reason=shown(why))


def _limit_memory() -> None:
    """Give this process _MAX_BYTES, or what the daemon itself was limited to (ulimit -v)."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = _MAX_BYTES if most == resource.RLIM_INFINITY else min(_MAX_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    childlog.begin(int(sys.argv[2]))
    inside.begin()
    _limit_memory()
    sock = socket.socket(fileno=int(sys.argv[1]))
    with suppress(BrokenPipeError, ConnectionResetError):
        sock.send(b"ready")
        while True:
            data, fds, _, _ = socket.recv_fds(sock, MAX_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            if not data:
                return
            answer, opened = look(msgspec.msgpack.decode(data, type=Question), fds[0])
            socket.send_fds(sock, [msgspec.msgpack.encode(answer)], opened)
            for fd in (*fds, *opened):
                os.close(fd)


assert MAX_FILES < 253, "the kernel's SCM_MAX_FD"

if __name__ == "__main__":
    main()
