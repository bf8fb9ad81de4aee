"""Create, from its frame to the session. Examining a model takes time, and happens outside the daemon's loop."""

import asyncio
import logging
import os

from kvloom.gewu.codes import Code, Refused
from kvloom.gewu.hosts.prober import Prober
from kvloom.gewu.modelfiles import ModelFiles
from kvloom.gewu.prober.probe import Found, code_of_errno
from kvloom.gewu.protocol.frames import Frame, FrameError
from kvloom.gewu.protocol.schema import Attributes, parse_attributes
from kvloom.gewu.qos import effective_level
from kvloom.gewu.service.connection import Connection
from kvloom.gewu.service.models import Models
from kvloom.gewu.service.sessions import Session, Sessions
from kvloom.gewu.service.settings import Settings

log = logging.getLogger(__name__)

_MAX_ERRNO = 4095  # the largest of Linux
_MAX_UNANSWERED = 16  # concurrent Creates of a client


class Creation:
    """Answers every Create, once."""

    def __init__(self, settings: Settings, prober: Prober, sessions: Sessions, models: Models) -> None:
        self._settings = settings
        self._prober = prober
        self._sessions = sessions
        self._models = models
        self._tasks: dict[asyncio.Task[None], Connection] = {}

    def begin(self, connection: Connection, frame: Frame) -> None:
        """Begin a Create. Raises Refused, FrameError; otherwise the answer is sent later."""
        fd = None if frame.c else connection.take_fd()  # taken first: it is this call's even if that is refused below
        if (fd is None and not frame.c) or frame.c > _MAX_ERRNO:
            raise FrameError("there is neither a descriptor nor a reason why")
        try:
            attributes = parse_attributes(frame.payload)
            if list(self._tasks.values()).count(connection) >= _MAX_UNANSWERED:
                raise Refused(Code.NOMEM, f"{_MAX_UNANSWERED} calls of this process wait for their models already")
            pid, fd = self._stand_in(attributes.model, connection.pid, fd, frame.c)
        except Refused:
            if fd is not None:
                os.close(fd)
            raise
        task = asyncio.get_running_loop().create_task(self._create(connection, frame, attributes, pid, fd))
        self._tasks[task] = connection
        task.add_done_callback(self._tasks.pop)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _create(self, connection: Connection, frame: Frame, attributes: Attributes, pid: int, fd: int) -> None:
        try:
            found, files = await self._prober.look(fd, pid)
            if connection.is_open:
                self._admit(connection, frame, attributes, found, files)
            else:
                files.close()
        except Refused as refused:
            log.info("process %d: %s", connection.pid, refused)
            connection.send(Frame("r", frame.a, refused.code, payload=str(refused).encode()))
        except Exception:  # a bug here must not leave the app waiting for ever
            log.exception("process %d: Create failed", connection.pid)
            connection.send(Frame("r", frame.a, Code.FAULT, payload=b"the service failed; its log says more"))
        finally:
            os.close(fd)

    def _admit(
        self, connection: Connection, frame: Frame, attributes: Attributes, found: Found, files: ModelFiles
    ) -> None:
        level = effective_level(attributes.level, frame.d)
        model = self._models.admit(found, files, attributes.max_ctx, level)
        session = Session(
            connection.id, frame.b, model.key, attributes.level, attributes.keep_alive_s, attributes.max_ctx
        )
        self._sessions.create(session)
        connection.send(Frame("r", frame.a, Code.OK, frame.b))

    def _stand_in(self, model: str, pid: int, fd: int | None, number: int) -> tuple[int, int]:
        """The file to load: what the client opened, or what an alias of this service names instead; and the process
        whose permissions apply. Raises Refused with the client's errno or the service's own.
        """
        path = self._settings.resolve(model)
        if path == model and fd is not None:
            return pid, fd
        try:
            if path == model:
                raise OSError(number, os.strerror(number))
            opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise Refused(code_of_errno(error.errno or number), f"{path}: {error.strerror}") from None
        if fd is not None:
            os.close(fd)
        return os.getpid(), opened
