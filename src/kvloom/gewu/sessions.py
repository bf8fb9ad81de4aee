"""Sessions and requests of all clients. Pure bookkeeping: who may submit, who is next, what ends with what.

A request is QUEUED behind the earlier ones of its session, or STARTED: handed to the model, loaded or not. Of a session
one request is started at a time, the oldest.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from kvloom.gewu.codes import Code, Refused
from kvloom.gewu.qos import Level
from kvloom.gewu.schema import Chat

MAX_PER_SESSION = 64
MAX_REQUESTS = 512


class Phase(Enum):
    QUEUED = "queued"
    STARTED = "started"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Session:
    owner: int  # the connection
    id: int  # the client's handle
    model: str  # key of the model
    level: Level | None  # explicit one
    keep_alive_s: float | None = None
    requests: list["Request"] = field(default_factory=list)  # not ended, oldest first

    @property
    def salt(self) -> str:
        """Prefix-cache salt: the KV of a session is its own."""
        return f"{self.owner}.{self.id}"


@dataclass(slots=True, eq=False)
class Request:
    session: Session
    id: int
    chat: Chat
    level: Level
    phase: Phase = Phase.QUEUED
    num_prompt: int = 0  # tokens
    num_cached: int = 0
    num_output: int = 0
    parts: list[str] = field(default_factory=list)  # text so far, when not streamed

    @property
    def num_prompt_bytes(self) -> int:
        return sum(len(content.encode()) for _, content in self.chat.messages)

    @property
    def key(self) -> str:
        return f"{self.session.owner}.{self.session.id}.{self.id}"


class Sessions:
    """The table. Methods that end requests return what the caller must stop or start."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[int, int], Session] = {}
        self._requests: dict[str, Request] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def __len__(self) -> int:
        return len(self._sessions)

    def create(self, session: Session) -> None:
        """Raises Refused when the handle is taken."""
        place = (session.owner, session.id)
        if place in self._sessions:
            raise Refused(Code.EXIST, f"session {session.id} exists")
        self._sessions[place] = session

    def find(self, owner: int, id: int) -> Session:
        """Raises Refused: another client's session is as unknown as one that never was."""
        try:
            return self._sessions[owner, id]
        except KeyError:
            raise Refused(Code.NOENT, f"there is no session {id}") from None

    def submit(self, session: Session, request: Request) -> None:
        """Queue a request. Raises Refused when a queue is full."""
        if len(session.requests) >= MAX_PER_SESSION:
            raise Refused(Code.NOMEM, f"the session has {MAX_PER_SESSION} unfinished requests")
        if len(self._requests) >= MAX_REQUESTS:
            raise Refused(Code.NOMEM, f"the service has {MAX_REQUESTS} unfinished requests")
        if request.key in self._requests:
            raise Refused(Code.EXIST, f"request {request.id} exists")
        session.requests.append(request)
        self._requests[request.key] = request

    def start_next(self, session: Session) -> Request | None:
        """The session's oldest request, now STARTED, unless it already was or there is none."""
        if not session.requests or session.requests[0].phase is not Phase.QUEUED:
            return None
        request = session.requests[0]
        request.phase = Phase.STARTED
        return request

    def request(self, key: str) -> Request | None:
        """The unfinished request of that key."""
        return self._requests.get(key)

    def end(self, request: Request) -> bool:
        """Forget a request; whether it was started, so that the engine must drop it if it has not ended there."""
        if request.phase is Phase.ENDED:
            return False
        was_started = request.phase is Phase.STARTED
        request.phase = Phase.ENDED
        request.session.requests.remove(request)
        del self._requests[request.key]
        return was_started

    def destroy(self, session: Session) -> list[Request]:
        """Forget a session and its requests; returns those that were started."""
        del self._sessions[session.owner, session.id]
        return [request for request in list(session.requests) if self.end(request)]

    def of_owner(self, owner: int) -> list[Session]:
        return [session for session in self._sessions.values() if session.owner == owner]

    def of_model(self, model: str) -> list[Session]:
        return [session for session in self._sessions.values() if session.model == model]

    def started(self) -> Iterator[Request]:
        return (request for request in self._requests.values() if request.phase is Phase.STARTED)

    def unfinished(self, model: str | None = None) -> list[Request]:
        return [r for r in self._requests.values() if model is None or r.session.model == model]

    def check(self) -> None:
        """Assert the invariants."""
        listed = [request for session in self for request in session.requests]
        assert {request.key: request for request in listed} == self._requests
        assert len(self._requests) <= MAX_REQUESTS
        for session in self:
            assert len(session.requests) <= MAX_PER_SESSION
            phases = [request.phase for request in session.requests]
            assert Phase.ENDED not in phases
            assert Phase.STARTED not in phases[1:], "only the oldest request of a session is started"
