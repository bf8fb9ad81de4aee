"""A parent of one child of every kind, each started by the code that starts it in the product. A program of its own.

`python -m tests.processes.parent`: prints {kind: process id} as JSON when all children are bound to this process, then
waits. Children get no first message, so that they wait for it, as they would for orders.
"""

import asyncio
import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ems.private_agent import EmbeddedAgent
from kvloom.contract.config import EngineConfig
from kvloom.engine.hosted.host import Host
from kvloom.engine.link.ranks import RankExecutor
from kvloom.gewu.hosts.prober import Prober
from kvloom.gewu.hosts.worker import WorkerOpener
from kvloom.gewu.modelfiles import ModelFiles
from kvloom.images import process as painting
from kvloom.images.messages import Setup
from kvloom.processes import kinds
from kvloom.processes.channel import Channel
from kvloom.processes.child import Child, Template, lifeline
from kvloom.server.http import parsing
from kvloom.server.serving.options import WireOptions
from tests.support.waiting import until


@dataclass
class NoModels:
    """What the process that parses bodies is told of models, of which it serves none."""

    options: Any = field(default_factory=WireOptions)
    picture_names: tuple[str, ...] = ()

    def __iter__(self):
        return iter(())


found: dict[str, int] = {}  # process ids by kind


def start_rank() -> None:
    RankExecutor(kinds.RANK, EngineConfig(backend="fake"), list)


def start_vllm() -> None:
    Host(kinds.VLLM, EngineConfig(model="/nowhere"), list)


def start_painter() -> None:
    painting.check = lambda path: None
    painting.PictureProcess("painter", Setup("/nowhere"))


def start_parser() -> None:
    kept = Template(parsing._starter(NoModels()))
    parser = Child(kinds.PARSER, "parser", template=kept)
    found.update({"parser": parser.pid, "template of parsers": kept.pids[0]})
    signal.pause()


def start_worker() -> None:
    asyncio.run(_worker())


async def _worker() -> None:
    opener = WorkerOpener(30.0)
    kept = await opener._started(ModelFiles("", {}))
    found.update(worker=kept.pid, template=opener.pids[0])
    await asyncio.Event().wait()
    assert kept


def start_prober() -> None:
    asyncio.run(_prober())


async def _prober() -> None:
    kept = Prober("fake")
    await kept.start()
    await asyncio.Event().wait()


def start_embedded_agent() -> None:
    kept = EmbeddedAgent("16M")
    kept.start()
    signal.pause()


def start_fleet_agent() -> None:
    os.environ["EMS_SOCKET"] = str(Path(tempfile.mkdtemp()) / "ems.sock")
    kept = importlib.import_module("kvloom.fleet.agent")._started(16 << 20)
    signal.pause()
    kept.close()


def start_engine_host() -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "kvloom.engine_api.host", str(theirs.fileno())]
    subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=lifeline()).wait()
    ours.close()


STARTS: dict[str, tuple[str, Callable[[], None]]] = {
    "rank": ("kvloom.rank.main", start_rank),
    "vllm": ("kvloom.vllm.main", start_vllm),
    "painter": ("kvloom.images.main", start_painter),
    "parser": ("", start_parser),
    "template of parsers": ("", lambda: None),
    "engine host": ("kvloom.engine_api.host", start_engine_host),
    "worker": ("", start_worker),  # forked from
    "template": ("", lambda: None),
    "prober": ("kvloom.gewu.prober.main", start_prober),
    "embedded agent": ("--ends-with-stdin", start_embedded_agent),
    "fleet agent": ("--ends-with-stdin", start_fleet_agent),
}


def is_bound(pid: int) -> bool:
    """Whether the kernel will send it a signal when its parent ends."""
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if int(path.read_text().split("flags:")[1].split()[0], 8) & os.O_ASYNC:
                return True
    return False


def main() -> None:
    Channel.send = lambda *_: None
    popen = subprocess.Popen.__init__

    def started(self: Any, command: Any, *arguments: Any, **options: Any) -> None:
        popen(self, command, *arguments, **options)
        name = threading.current_thread().name
        if name in STARTS and STARTS[name][0] in command:
            found[name] = self.pid

    subprocess.Popen.__init__ = started
    for name, (_, start) in STARTS.items():
        threading.Thread(target=start, name=name, daemon=True).start()
    until(lambda: len(found) == len(STARTS) and all(map(is_bound, found.values())))
    print(json.dumps(found), flush=True)
    lifeline()
    signal.pause()


if __name__ == "__main__":
    main()
