"""The daemon: clients' frames -> sessions -> models, and replies back. Everything runs on one asyncio loop."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from kvloom.gewu.codes import Code, Refused
from kvloom.gewu.connection import Connection
from kvloom.gewu.fakehost import FakeOpener
from kvloom.gewu.frames import Frame, FrameError
from kvloom.gewu.messages import Event, Opener
from kvloom.gewu.models import Models
from kvloom.gewu.probe import code_of_errno, probe
from kvloom.gewu.psi import Watcher, open_triggers
from kvloom.gewu.qos import Level, effective_level
from kvloom.gewu.schema import Attributes, parse_attributes, parse_chat, reply
from kvloom.gewu.sessions import Phase, Request, Session, Sessions
from kvloom.gewu.settings import Settings
from kvloom.gewu.system import is_power_short
from kvloom.gewu.workerhost import open_worker

log = logging.getLogger(__name__)

_TICK_S = 0.5
_BACKLOG = 128
_FIRST_PASSED_FD = 3  # systemd's socket activation


@dataclass(frozen=True, slots=True)
class _Opening:
    """A Create whose path the client is opening."""

    session_id: int
    attributes: Attributes
    level: Level


class Daemon:
    """Answers clients. `settings.fake` puts a fake engine into this process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        opener: Opener = FakeOpener(settings.fake) if settings.fake else open_worker
        self._sessions = Sessions()
        self._models = Models(opener, settings, self._sessions, self._take_events, self._fail)
        self._connections: dict[int, Connection] = {}
        self._openings: dict[tuple[int, int], _Opening] = {}  # by connection and call
        self._last_id = 0
        self._operations: dict[str, Callable[[Connection, Frame], None]] = {
            "C": self._create,
            "F": self._opened,
            "S": self._submit,
            "A": self._abort,
            "D": self._destroy,
            "Q": self._status,
        }

    async def serve(self, listener: socket.socket, stop: asyncio.Event) -> None:
        """Accept clients until `stop` is set, then unload everything."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        loop.add_reader(listener, self._accept, listener)
        triggers = open_triggers(self._settings.psi_file)
        watcher = Watcher(triggers, lambda level: loop.call_soon_threadsafe(self._models.tick, level))
        ticker = loop.create_task(self._tick())
        try:
            await stop.wait()
        finally:
            ticker.cancel()
            watcher.close()
            loop.remove_reader(listener)
            for connection in list(self._connections.values()):
                connection.close()
            await self._models.close()

    # -- clients

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            sock, _ = listener.accept()
            connection = Connection(sock, self._take_frame, self._end)
            self._last_id += 1
            connection.id = self._last_id
            self._connections[connection.id] = connection
            if connection.uid not in (0, os.geteuid()):
                log.warning("refused process %d of user %d", connection.pid, connection.uid)
                connection.close()

    def _end(self, connection: Connection) -> None:
        """The client is gone: all its sessions are destroyed."""
        del self._connections[connection.id]
        for place in [place for place in self._openings if place[0] == connection.id]:
            del self._openings[place]
        for session in self._sessions.of_owner(connection.id):
            self._drop(session)

    def _take_frame(self, connection: Connection, frame: Frame) -> None:
        operation = self._operations.get(frame.op)
        if operation is None:
            raise FrameError(f"unknown operation {frame.op!r}")
        try:
            operation(connection, frame)
        except Refused as refused:
            if frame.op != "A":
                log.info("process %d: %s", connection.pid, refused)
                connection.send(Frame("r", frame.a, refused.code, payload=str(refused).encode()))

    # -- operations; Refused is answered by the caller

    def _create(self, connection: Connection, frame: Frame) -> None:
        attributes = parse_attributes(frame.payload)
        level = effective_level(attributes.level, frame.d)
        self._openings[connection.id, frame.a] = _Opening(frame.b, attributes, level)
        connection.send(Frame("o", frame.a, payload=self._settings.resolve(attributes.model).encode()))

    def _opened(self, connection: Connection, frame: Frame) -> None:
        opening = self._openings.pop((connection.id, frame.a), None)
        if opening is None:
            raise FrameError("no path was asked for")
        if frame.b:
            raise Refused(code_of_errno(frame.b), f"{opening.attributes.model}: {os.strerror(frame.b)}")
        fd = connection.take_fd()
        if fd is None:
            raise FrameError("the descriptor is missing")
        try:
            found = probe(fd)
        except Refused:
            os.close(fd)
            raise
        attributes = opening.attributes
        model = self._models.admit(found, fd, attributes.max_ctx, opening.level)
        self._sessions.create(
            Session(connection.id, opening.session_id, model.key, attributes.level, attributes.keep_alive_s)
        )
        connection.send(Frame("r", frame.a, Code.OK))

    def _submit(self, connection: Connection, frame: Frame) -> None:
        session = self._sessions.find(connection.id, frame.b)
        chat = parse_chat(frame.payload)
        request = Request(session, frame.c, chat, effective_level(session.level, frame.d))
        self._models.reserve(request)
        self._sessions.submit(session, request)
        connection.send(Frame("r", frame.a, Code.OK))
        self._advance(session)

    def _abort(self, connection: Connection, frame: Frame) -> None:
        session = self._sessions.find(connection.id, frame.b)
        request = next((request for request in session.requests if request.id == frame.c), None)
        if request is not None:
            if self._sessions.end(request):
                self._models.stop(request)
            self._advance(session)

    def _destroy(self, connection: Connection, frame: Frame) -> None:
        self._drop(self._sessions.find(connection.id, frame.b))
        connection.send(Frame("r", frame.a, Code.OK))

    def _status(self, connection: Connection, frame: Frame) -> None:
        connection.send(Frame("r", frame.a, Code.OK, payload=msgspec.json.encode(self._describe())))

    # -- requests

    def _drop(self, session: Session) -> None:
        for request in self._sessions.destroy(session):
            self._models.stop(request)
        self._models.released(session.model)

    def _advance(self, session: Session) -> None:
        """Start the session's next request, if it is its turn."""
        request = self._sessions.start_next(session)
        if request is not None:
            self._models.start(request)

    def _take_events(self, events: list[Event]) -> None:
        """Text from a model; events of requests that were aborted meanwhile are dropped."""
        for event in events:
            request = self._sessions.request(event.key)
            if request is None:
                continue
            request.num_prompt, request.num_cached = event.num_prompt, event.num_cached
            request.num_output = event.num_output
            self._deliver(request, event)
            if event.finish is not None and self._sessions.end(request):
                self._models.ended(request)
                self._advance(request.session)

    def _deliver(self, request: Request, event: Event) -> None:
        error = (Code.FAULT, event.error) if event.error else None
        if not request.chat.is_streamed:
            request.parts.append(event.text)
            if event.finish is not None:
                self._reply(request, reply("".join(request.parts), event.finish, error), True)
        elif event.text or event.finish is not None:
            self._reply(request, reply(event.text, event.finish, error), event.finish is not None)

    def _fail(self, requests: list[Request], code: Code, why: str) -> None:
        """These requests end with an error. Their sessions live on."""
        sessions = {request.session.salt: request.session for request in requests}
        for request in requests:
            if request.phase is not Phase.ENDED:
                self._sessions.end(request)
                self._reply(request, reply("", "abort", (code, why)), True)
        for session in sessions.values():
            self._advance(session)

    def _reply(self, request: Request, payload: bytes, is_final: bool) -> None:
        session = request.session
        connection = self._connections.get(session.owner)
        if connection is not None:
            connection.send(Frame("e", session.id, request.id, int(is_final), payload=payload))

    # -- time and people

    async def _tick(self) -> None:
        interval_s = min(_TICK_S, max(0.02, self._settings.idle_unload_s / 4))
        while True:
            await asyncio.sleep(interval_s)
            self._models.power_reason = is_power_short(self._settings.psi_file.parent)
            self._models.tick()

    def _describe(self) -> dict[str, Any]:
        sessions = [
            {
                "pid": self._connections[session.owner].pid,
                "session": session.id,
                "qos": None if session.level is None else session.level.name.lower(),
                "kv_bytes": self._models.kv_bytes(session),
                "requests": [_describe_request(request) for request in session.requests],
            }
            for session in self._sessions
        ]
        return {"pid": os.getpid(), **self._models.status(), "sessions": sessions}


def _describe_request(request: Request) -> dict[str, Any]:
    return {
        "request": request.id,
        "state": request.phase.value,
        "qos": request.level.name.lower(),
        "prompt_tokens": request.num_prompt,
        "cached_tokens": request.num_cached,
        "output_tokens": request.num_output,
    }


def open_listener(settings: Settings) -> socket.socket:
    """The socket to accept on: systemd's, or a new one at the configured path, for this user only.

    Raises OSError when another daemon listens there.
    """
    if os.environ.get("LISTEN_PID") == str(os.getpid()):
        return socket.socket(fileno=_FIRST_PASSED_FD)
    path = settings.socket
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as old:
        try:
            old.connect(str(path))
        except FileNotFoundError:
            pass
        except ConnectionRefusedError:  # left by a daemon that was killed
            path.unlink()
        else:
            raise OSError(f"a daemon listens on {path} already")
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(mask)
    listener.listen(_BACKLOG)
    return listener


async def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT."""
    listener = open_listener(settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    log.info("listening on %s", listener.getsockname())
    with listener:
        await Daemon(settings).serve(listener, stop)
    with contextlib.suppress(FileNotFoundError):
        if "LISTEN_PID" not in os.environ:
            settings.socket.unlink()
