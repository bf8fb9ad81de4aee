"""The process of a text-to-image model: loads a pipeline, then executes orders until its socket closes.

`python -m kvloom.images.main SOCKET LEVEL`: the number of an open socket, and the log level.
"""

import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import msgspec

from kvloom.contract.errors import BadRequest, ModelError
from kvloom.contract.lifecycle import Failed, Pong, Ready
from kvloom.images.messages import SIGN_S, Cancel, Cancelled, Ended, Order, Paint, Picture, Progress, Setup
from kvloom.processes import childlog, inside
from kvloom.processes.channel import Channel
from kvloom.processes.frames import frame

if TYPE_CHECKING:
    from kvloom.images.pipeline import Pipeline

_NICENESS = 5  # a picture takes seconds; language models, whose tokens clients wait for, come first


class Line(Channel):
    """The channel to the server, on which another thread sends signs of life."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, Setup)
        self._sending = threading.Lock()

    def send(self, message: Any, timeout_s: float | None = None) -> None:
        """See Channel."""
        with self._sending:
            super().send(message, timeout_s)

    def send_signs(self) -> None:
        """Send a sign of life now and then, until the server is gone. Never waits for the server to read."""
        sign = frame(msgspec.msgpack.encode(Pong()))
        with suppress(OSError):
            while True:
                with self._sending, suppress(BlockingIOError):
                    self._sock.send(sign, socket.MSG_DONTWAIT)
                time.sleep(SIGN_S)


class _Desk:
    """Incoming orders: Paints wait in turn; a Cancel takes effect at the running order's next step."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._paints: deque[Paint] = deque()
        self._cancelled: set[int] = set()

    def next(self) -> Paint:
        """The next order that was not cancelled. Raises EOFError when the server is gone."""
        while True:
            while not self._paints:
                self._take()
            self._take_all()
            paint = self._paints.popleft()
            if paint.id not in self._cancelled:
                self._cancelled = {id for id in self._cancelled if id > paint.id}  # the others are over
                return paint

    def check(self, id: int) -> None:
        """Raises Cancelled when the order was cancelled, EOFError when the server is gone."""
        self._take_all()
        if id in self._cancelled:
            raise Cancelled

    def _take_all(self) -> None:
        while self._channel.is_readable():
            self._take()

    def _take(self) -> None:
        order: Order = self._channel.receive()
        if isinstance(order, Cancel):
            self._cancelled.add(order.id)
        else:
            self._paints.append(order)


def serve(channel: Channel) -> None:
    """Answer orders until the server closes the socket."""
    setup: Setup = channel.receive()
    channel.expect(Order)
    if setup.cores:
        os.sched_setaffinity(0, setup.cores)  # of this thread and those that it will start
    try:
        # imports torch: only now, when this process already ends with its parent
        pipeline = cast("Pipeline", import_module("kvloom.images.pipeline").open_pipeline(setup))
    except ModelError as error:
        channel.send(Failed(str(error)))
        return
    give_way()
    channel.send(Ready(pipeline.info))
    desk = _Desk(channel)
    while True:
        paint = desk.next()
        channel.send(_painted(paint, pipeline, desk, channel))


def give_way() -> None:
    """Let other processes come first. Before a model is loaded, its start would take minutes beside busy ones."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, int(thread), _NICENESS)


def _painted(paint: Paint, pipeline: "Pipeline", desk: _Desk, channel: Channel) -> Ended:
    """Paint and send the pictures of one order. Returns how it ended."""

    def on_step(picture: int, step: int, num_steps: int) -> None:
        channel.send(Progress(paint.id, picture, step, num_steps))
        desk.check(paint.id)

    def on_picture(picture: int, data: bytes, partial: int | None) -> None:
        channel.send(Picture(paint.id, picture, data, partial, count))

    try:
        count = pipeline.check(paint)
        for number in range(len(paint.seeds)):
            pipeline.paint(paint, number, on_step, on_picture)
    except Cancelled:
        return Ended(paint.id, error="cancelled")
    except BadRequest as error:
        return Ended(paint.id, error=error.problem, field=error.field)
    except (EOFError, OSError):  # the server is gone
        raise
    except Exception as error:  # whatever it is, the client gets an error; the pipeline goes on with the next order
        traceback.print_exc()
        return Ended(paint.id, error=f"the pipeline failed: {type(error).__name__}: {error}")
    return Ended(paint.id, count)


def main() -> None:
    childlog.begin(int(sys.argv[2]))
    inside.begin()
    line = Line(socket.socket(fileno=int(sys.argv[1])))
    threading.Thread(target=line.send_signs, name="signs of life", daemon=True).start()
    try:
        serve(line)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


if __name__ == "__main__":
    main()
