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
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import msgspec

from kvloom.contract.errors import ServingError
from kvloom.contract.images import Sight
from kvloom.contract.messages import RankInfo
from kvloom.processes import childlog, inside, template
from kvloom.processes.channel import receive_frame
from kvloom.server.config.settings import ServerConfig
from kvloom.server.dialects.operators.status import Control
from kvloom.server.errors import BUG_TEXT, TooLarge
from kvloom.server.http.parsing import Setup, Unpickler, Work, dumped, parsed, send_parts
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
    """`SOCKET LEVEL SETUP`, the last the number of an open file. Forks workers until the server closes the socket."""
    number, level, setup = map(int, sys.argv[1:])
    childlog.begin(level)
    inside.begin()
    with open(f"/proc/self/fd/{setup}", "rb") as file:  # from its beginning, which other starts read too
        sys.path[:], told = pickle.load(file)
    models, endpoints = _served(pickle.loads(told))
    for message, fds in template.forks(socket.socket(fileno=number)):
        order = msgspec.msgpack.decode(message, type=template.Order)
        template.become(order, fds)
        inside.begin()
        os.nice(_NICENESS)
        resource.setrlimit(resource.RLIMIT_DATA, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
        gc.disable()  # a worker's memory is freed when it ends
        template.finish(partial(_serve, socket.socket(fileno=order.targets[-1]), models, endpoints))


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


def _serve(sock: socket.socket, models: Models, endpoints: Endpoints) -> None:
    with contextlib.suppress(OSError):  # the server has closed the socket
        while (head := receive_frame(sock)) is not None:
            body = receive_frame(sock)
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
