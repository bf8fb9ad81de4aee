"""The process that parses large bodies: `python -m kvloom.server.run.parse_process`, started by parsing.py.

It loads what parsing needs once, and then only forks: a worker is ready within milliseconds, parses one body at a time,
and is killed with all its memory when its work is not wanted any more.
"""

import contextlib
import gc
import logging
import os
import pickle
import resource
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from kvloom.contract.errors import ServingError
from kvloom.contract.images import Sight
from kvloom.contract.messages import RankInfo
from kvloom.processes import inside
from kvloom.server.config.settings import ServerConfig
from kvloom.server.dialects.operators.status import Control
from kvloom.server.errors import BUG_TEXT, TooLarge
from kvloom.server.http.parsing import CONTROL, FORK, Setup, Unpickler, Work, dumped, parsed, receive, send_parts
from kvloom.server.http.reply import Endpoint
from kvloom.server.run.mount import make_dialects
from kvloom.server.serving.admission import Admission
from kvloom.server.serving.engine import EngineLike
from kvloom.server.serving.health import Health
from kvloom.server.serving.registry import Models
from kvloom.server.serving.service import GenerationService

log = logging.getLogger(__name__)

_MAX_MEMORY_BYTES = 1 << 30  # of one worker
_NICENESS = 10  # nice value: the model's own processes come first

Endpoints = Mapping[tuple[str, str], Endpoint]


@dataclass(frozen=True, slots=True)
class _Engine:
    """The attributes of an engine that parsing needs; the engine runs elsewhere."""

    max_seq_len: int
    info: RankInfo


def main() -> None:
    """Fork and kill workers on the server's orders, until it closes the socket."""
    inside.leave_signals_to_the_parent()
    control = socket.socket(fileno=int(sys.argv[1]))
    sys.path[:], setup = pickle.load(sys.stdin.buffer)
    inside.begin()
    models, endpoints = _served(pickle.loads(setup))
    gc.collect()
    gc.disable()  # a worker's memory is freed when it ends
    gc.freeze()
    children: dict[int, int] = {}  # process ids by the number of the worker
    while True:
        data, sockets, _, _ = socket.recv_fds(control, CONTROL.size, 1)
        if not data:
            break
        kind, number = CONTROL.unpack(data)
        _reap(children)
        if kind == FORK:
            children[number] = _fork(socket.socket(fileno=sockets[0]), control, models, endpoints)
        elif number in children:
            os.kill(children[number], signal.SIGKILL)
    for process_id in children.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)


def _served(setup: Setup) -> tuple[Models, Endpoints]:
    admission = Admission(1)
    services = [
        GenerationService(card, cast(EngineLike, _Engine(max_seq_len, info)), tokenizer, admission)
        for card, max_seq_len, info, tokenizer in setup.services
    ]
    models = Models(services, setup.options, dict.fromkeys(setup.pictures), admission)

    async def stop(grace_s: float | None) -> None:
        raise AssertionError("nothing is stopped here")

    config = ServerConfig(tuple(service.card for service in services), options=setup.options)
    dialects = make_dialects(models, Health(models), Control(stop), config)
    return models, {(each.method, each.path): each for dialect in dialects for each in dialect.endpoints}


def _reap(children: dict[int, int]) -> None:
    """Forget ended workers, whose process ids may be reused."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            for number, process_id in list(children.items()):
                if process_id == ended:
                    del children[number]


def _fork(sock: socket.socket, control: socket.socket, models: Models, endpoints: Endpoints) -> int:
    """The child's process id; the child serves the socket and never returns."""
    parent, process_id = os.getpid(), os.fork()
    if process_id:
        sock.close()
        return process_id
    status = 1
    try:
        inside.signal_at_end_of_thread(signal.SIGKILL)  # whatever it is doing: no other process would end it
        if os.getppid() != parent:
            return 0
        control.close()
        os.nice(_NICENESS)
        resource.setrlimit(resource.RLIMIT_DATA, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
        _serve(sock, models, endpoints)
        status = 0
    except OSError:  # the server has closed the socket
        status = 0
    except Exception:
        log.exception("a parser failed")
    finally:
        os._exit(status)


def _serve(sock: socket.socket, models: Models, endpoints: Endpoints) -> None:
    while (head := receive(sock)) is not None:
        body = receive(sock)
        if body is None:
            return
        work = Unpickler([head], models, Sight()).load()  # images that were looked at stay in the server
        send_parts(sock, _reply(work, body, models, endpoints))


def _reply(work: Work, body: bytes, models: Models, endpoints: Endpoints) -> Sequence[bytes | memoryview]:
    """(False, the result) or (True, the error), pickled."""
    models.assume(work.adapters)
    try:
        return dumped((False, parsed(endpoints[work.endpoint], replace(work.request, body=body))))
    except ServingError as error:
        return dumped((True, error))
    except MemoryError:
        return dumped((True, TooLarge("the request takes more memory to read than this server gives")))
    except Exception:  # a bug of ours; the client is told nevertheless
        log.exception("parsing %s %s failed", *work.endpoint)
        return dumped((True, ServingError(BUG_TEXT)))


if __name__ == "__main__":
    main()
