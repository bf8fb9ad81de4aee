"""The daemon: clients' frames -> sessions -> models, and replies back. Everything runs on one asyncio loop."""

import asyncio
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from kvloom.gewu.codes import Code, Refused
from kvloom.gewu.hosts.fake import FakeOpener
from kvloom.gewu.hosts.prober import Prober
from kvloom.gewu.hosts.worker import WorkerOpener
from kvloom.gewu.protocol.frames import Frame, FrameError
from kvloom.gewu.protocol.messages import Event, Opener
from kvloom.gewu.protocol.schema import parse_chat, reply, waiting
from kvloom.gewu.qos import effective_level
from kvloom.gewu.service.connection import Connection
from kvloom.gewu.service.creation import Creation
from kvloom.gewu.service.frame_budget import FrameBudgets
from kvloom.gewu.service.ledger import Ledger
from kvloom.gewu.service.listener import Acceptor, Listener, Renewed, keep_reachable
from kvloom.gewu.service.models import Models, Outcomes
from kvloom.gewu.service.psi import Watcher, open_triggers
from kvloom.gewu.service.sessions import Phase, Request, Session, Sessions
from kvloom.gewu.service.settings import Settings
from kvloom.gewu.service.system import is_power_short, measure_processes
from kvloom.net.listening import allow_descriptors

log = logging.getLogger(__name__)

_TICK_S = 0.5
_MEASURE_S = 2.0


class Daemon:
    """Answers clients. `settings.fake` puts a fake engine into this process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        opener: Opener = FakeOpener(settings.fake) if settings.fake else WorkerOpener(settings.worker_silence_s)
        self._sessions = Sessions()
        self._prober = Prober(settings.backend)
        ledger = Ledger(opener.has_processes, lambda: [os.getpid(), *self._prober.pids, *opener.pids])
        on = Outcomes(self._take_events, self._fail)
        self._models = Models(opener, settings, self._sessions, ledger, on)
        self._creation = Creation(settings, self._prober, self._sessions, self._models)
        self._budgets = FrameBudgets()
        self._connections: dict[int, Connection] = {}
        self._last_id = 0
        self._operations: dict[str, Callable[[Connection, Frame], None]] = {
            "C": self._creation.begin,
            "S": self._submit,
            "A": self._abort,
            "D": self._destroy,
            "Q": self._status,
        }

    async def serve(self, listener: socket.socket, stop: asyncio.Event, renewed: Renewed = lambda: None) -> None:
        """Accept clients until `stop` is set, then unload everything. renewed: gives another listener where clients no
        longer reach the present one.
        """
        loop = asyncio.get_running_loop()
        triggers = open_triggers(self._settings.psi_file)
        watcher = Watcher(triggers, lambda level: loop.call_soon_threadsafe(self._models.tick, 0.0, level))
        work, stopped = loop.create_task(self._work(listener, renewed)), loop.create_task(stop.wait())
        try:
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (work, stopped):
                task.cancel()
            await asyncio.gather(work, stopped, return_exceptions=True)
            watcher.close()
            for connection in list(self._connections.values()):
                connection.close()
            await self._creation.close()
            await self._prober.close()
            await self._models.close()

    async def _work(self, listener: socket.socket, renewed: Renewed) -> None:
        """Accept clients once their models can be looked at, for ever."""
        await self._prober.start()
        acceptor = Acceptor(listener, self._accept)
        looking = asyncio.create_task(keep_reachable(acceptor, renewed))
        try:
            await self._tick()
        finally:
            looking.cancel()
            acceptor.close()

    # -- clients

    def _accept(self, sock: socket.socket) -> None:
        connection = Connection(sock, self._take_frame, self._end, self._budgets)
        self._last_id += 1
        connection.id = self._last_id
        self._connections[connection.id] = connection
        if connection.uid not in (0, os.geteuid()):
            log.warning("refused process %d of user %d", connection.pid, connection.uid)
            connection.close()

    def _end(self, connection: Connection) -> None:
        """The client has disconnected: destroy all its sessions."""
        del self._connections[connection.id]
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
        except FrameError:
            raise
        except Exception:  # a bug here must not leave an app waiting for ever
            log.exception("process %d: operation %r failed", connection.pid, frame.op)
            if frame.op != "A":
                connection.send(Frame("r", frame.a, Code.FAULT, payload=b"the service failed; its log says more"))

    # -- operations; Refused is answered by the caller

    def _submit(self, connection: Connection, frame: Frame) -> None:
        session = self._sessions.find(connection.id, frame.b)
        chat = parse_chat(frame.payload)
        seed = secrets.randbits(63) if chat.seed is None else chat.seed
        request = Request(session, frame.c, chat, effective_level(session.level, frame.d), seed)
        self._models.reserve(request)
        self._sessions.submit(session, request)
        connection.send(Frame("r", frame.a, Code.OK, session.id, request.id))
        self._advance(session)
        self._tell_waiting()

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
        """Start the session's next request, unless one is running."""
        request = self._sessions.start_next(session)
        if request is not None:
            self._models.start(request)

    def _take_events(self, events: list[Event]) -> None:
        """Deliver a model's events; those of aborted requests, and tokens delivered before, are dropped."""
        for event in events:
            request = self._sessions.request(event.key)
            if request is None or (event.token_ids and event.num_output <= len(request.answer)):
                continue
            request.num_prompt, request.num_cached = event.num_prompt, event.num_cached
            request.num_output = event.num_output
            request.answer += event.token_ids
            self._deliver(request, event)
            if event.finish is not None and self._sessions.end(request):
                self._models.ended(request)
                self._advance(request.session)
            elif request.repute.num_crashes:
                self._models.progressed(request)

    def _deliver(self, request: Request, event: Event) -> None:
        error = (Code.FAULT, event.error) if event.error else None
        if not request.chat.is_streamed:
            request.parts.append(event.text)
            if event.finish is not None:
                self._reply(request, reply("".join(request.parts), event.finish, error), True)
        elif event.text or event.finish is not None:
            self._reply(request, reply(event.text, event.finish, error), event.finish is not None)

    def _fail(self, requests: list[Request], code: Code, why: str) -> None:
        """End these requests with an error; their sessions stay."""
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
        since_measured_s = _MEASURE_S
        while True:
            await asyncio.sleep(interval_s)
            since_measured_s += interval_s
            try:
                if since_measured_s >= _MEASURE_S and self._settings.fake is None:
                    since_measured_s = 0.0
                    self._models.take_measured(await asyncio.to_thread(measure_processes))
                self._models.power_reason = is_power_short(self._settings.psi_file.parent)
                self._models.tick(interval_s)
                self._tell_waiting()
            except Exception:  # a tick that fails must not be the last one
                log.exception("a look at memory and models failed")

    def _tell_waiting(self) -> None:
        """Tell streamed requests that they wait for power or memory and why, and when they no longer do."""
        for request in self._sessions.unfinished():
            why = self._models.why_waiting(request.level)
            if why != request.waits_for:
                request.waits_for = why
                if request.chat.is_streamed:
                    self._reply(request, waiting(why), False)

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
        "waits_for": request.waits_for,
    }


async def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; at a second one the process ends at once. Raises OSError when it cannot listen."""
    allow_descriptors()
    listener = Listener(settings.socket)
    stop = asyncio.Event()

    def end() -> None:
        if stop.is_set():  # its processes end with it
            listener.close()
            os._exit(1)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    log.info("listening on %s", listener.socket.getsockname())
    try:
        await Daemon(settings).serve(listener.socket, stop, listener.renewed)
    finally:
        listener.close()
