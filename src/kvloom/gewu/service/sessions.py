"""Sessions and requests of all clients. Pure bookkeeping: who may submit, which request is next, which run together,
what ends with what.

A request is QUEUED behind the earlier ones of its session, or STARTED: handed to the model, loaded or not. Each session
has one started request at a time, the oldest.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvloom.engine.schedule.repute import Repute
from kvloom.gewu.codes import Code, Refused
from kvloom.gewu.protocol.schema import Chat
from kvloom.gewu.qos import Level

MAX_PER_SESSION = 64
MAX_REQUESTS = 512
MAX_SESSIONS = 1024  # of a client
MAX_PROMPT_BYTES = 64 << 20  # bytes of all unfinished requests


class Phase(Enum):
    """Of a request; ENDED ones are forgotten."""

    QUEUED = "queued"
    STARTED = "started"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Session:
    """What an app has created; its requests run one after another."""

    owner: int  # the connection
    id: int  # the client's handle
    model: str  # key of the model
    level: Level | None  # set explicitly
    keep_alive_s: float | None = None
    max_ctx: int | None = None  # tokens of prompt and answer
    requests: list["Request"] = field(default_factory=list)  # unfinished requests, oldest first

    @property
    def salt(self) -> str:
        """Salt of the prefix cache: no session finds another one's KV."""
        return f"{self.owner}.{self.id}"


@dataclass(slots=True, eq=False)
class Request:
    """One submission to a session, from its arrival to its last reply."""

    session: Session
    id: int
    chat: Chat
    level: Level
    seed: int = 0  # the request's, or drawn: any process that continues the answer samples the same tokens
    phase: Phase = Phase.QUEUED
    answer: list[int] = field(default_factory=list)  # tokens of the answer so far
    repute: Repute = field(default_factory=Repute)
    num_prompt: int = 0  # tokens
    num_cached: int = 0
    num_output: int = 0
    waits_for: str | None = None  # the reason for a pause that the app was told
    num_prompt_bytes: int = 0
    parts: list[str] = field(default_factory=list)  # text so far, when not streamed

    def __post_init__(self) -> None:
        self.num_prompt_bytes = sum(len(content.encode()) for _, content in self.chat.messages)

    @property
    def key(self) -> str:
        """Unique among all clients' requests."""
        return f"{self.session.owner}.{self.session.id}.{self.id}"

    @property
    def is_suspect(self) -> bool:
        """Whether a model's process may have died of it."""
        return self.repute.is_suspect(len(self.answer))


class Sessions:
    """The table. Methods that end requests return those that the caller must stop or start."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[int, int], Session] = {}
        self._requests: dict[str, Request] = {}
        self._num_prompt_bytes = 0

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def __len__(self) -> int:
        return len(self._sessions)

    def create(self, session: Session) -> None:
        """Raises Refused when the handle is taken."""
        key = (session.owner, session.id)
        if key in self._sessions:
            raise Refused(Code.EXIST, f"session {session.id} exists")
        if len(self.of_owner(session.owner)) >= MAX_SESSIONS:
            raise Refused(Code.NOMEM, f"the process has {MAX_SESSIONS} sessions")
        self._sessions[key] = session

    def find(self, owner: int, id: int) -> Session:
        """Raises Refused: another client's session counts as unknown."""
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
        if self._num_prompt_bytes + request.num_prompt_bytes > MAX_PROMPT_BYTES:
            raise Refused(Code.NOMEM, f"the unfinished requests hold {MAX_PROMPT_BYTES >> 20} MiB of text")
        if request.key in self._requests:
            raise Refused(Code.EXIST, f"request {request.id} exists")
        session.requests.append(request)
        self._requests[request.key] = request
        self._num_prompt_bytes += request.num_prompt_bytes

    def start_next(self, session: Session) -> Request | None:
        """The session's oldest request, now STARTED; None if it was started already or there is none."""
        if not session.requests or session.requests[0].phase is not Phase.QUEUED:
            return None
        request = session.requests[0]
        request.phase = Phase.STARTED
        return request

    def request(self, key: str) -> Request | None:
        """The unfinished request of that key."""
        return self._requests.get(key)

    def end(self, request: Request) -> bool:
        """Forget a request. Returns whether it was started, so that the engine must abort it unless it ended there."""
        if request.phase is Phase.ENDED:
            return False
        was_started = request.phase is Phase.STARTED
        request.phase = Phase.ENDED
        request.session.requests.remove(request)
        del self._requests[request.key]
        self._num_prompt_bytes -= request.num_prompt_bytes
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
        assert self._num_prompt_bytes == sum(request.num_prompt_bytes for request in listed) <= MAX_PROMPT_BYTES
        for session in self:
            assert len(session.requests) <= MAX_PER_SESSION
            phases = [request.phase for request in session.requests]
            assert Phase.ENDED not in phases
            assert Phase.STARTED not in phases[1:], "only the oldest request of a session is started"


def batch_group(started: Sequence[Request], sent: Collection[str], hard_floor: Level) -> list[Request]:
    """The started requests of a model that its process should run together now; `sent`: keys of those that it has.

    All requests in a process that dies become suspects, and run alone from then on until they are cleared (repute.py):
    before all others, the highest class first. A suspect below `hard_floor` would not run, so others
    do not wait for it.
    """
    suspects = [request for request in started if request.is_suspect and request.level >= hard_floor]
    if not suspects:
        return [request for request in started if not request.is_suspect]
    return [min(suspects, key=lambda request: (request.key not in sent, -request.level))]
