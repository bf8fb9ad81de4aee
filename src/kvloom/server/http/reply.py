"""What a dialect gets and returns, independent of any web framework.

A dialect is a list of endpoints and the shape of its errors; app.py mounts them.
"""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvloom.contract.errors import ServingError
from kvloom.server.errors import ErrorReply
from kvloom.server.serving.vision.seen import Seen


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One HTTP request: its whole body, path parameters by name, query and headers (lower-case names).

    The header `x-request-id` is always there, the client's or a generated one.
    """

    body: bytes | bytearray = b""
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    tenant: str = ""  # the tenant of its API key
    more: Sequence[bytes] | None = None  # what the endpoint's `fetch` returned
    seen: Seen | None = None  # what the engine saw of its images
    time_s: float = field(default_factory=time.time)  # arrival, seconds since the epoch

    @property
    def num_bytes(self) -> int:
        """Bytes to be parsed."""
        return len(self.body) + sum(map(len, self.more or ()))


@dataclass(frozen=True, slots=True)
class Fetch:
    """Returned by `parse` when the request alone is not enough: `key` tells the endpoint what to fetch."""

    key: Any


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole body; or, with `frames`, the first frames of a stream and the source of the others."""

    body: bytes = b""
    frames: AsyncGenerator[bytes] | None = None
    status: int = 200
    media_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One route. `is_generating`: refused while the server drains, cancelled when its client disconnects.

    `parse` turns a request into a Reply, or a Job (job.py) to run; or, where there is an `answer`, into the value that
    `answer` gets beside the request, whose body is freed by then. `parse` does not wait and touches only its arguments
    and the models, so a large body can be parsed in another process (parsing.py); its result can be pickled. When it
    returns a Fetch, `fetch` is awaited with the request and the key, and `parse` is called again, with request.more.
    Without `parse`, `answer` gets the request alone, and no body is read. `is_early`: answers while models are being
    loaded too, and so uses none of them. `is_management`: moves to the management port when there is one;
    `is_everywhere`: is on both; `is_metrics`: moves to the metrics port when there is one. `summary`, `bodies` (structs
    that parse the body; any of them) and `is_streaming` are for the documentation.
    """

    method: str
    path: str  # in starlette's form: "/v1/models/{name}"
    answer: Callable[..., Awaitable[Reply]] | None = None
    summary: str = ""
    bodies: tuple[type, ...] = ()
    is_generating: bool = False
    is_management: bool = False
    is_everywhere: bool = False
    is_metrics: bool = False
    is_streaming: bool = False
    is_early: bool = False
    parse: Callable[[HttpRequest], Any] | None = None
    fetch: Callable[[HttpRequest, Any], Awaitable[Sequence[bytes]]] | None = None


def job_route(path: str, parse: Callable[[HttpRequest], Any], summary: str, *bodies: type) -> Endpoint:
    """A route that generates: `parse` gives a Job; its answers may be streamed."""
    return Endpoint("POST", path, None, summary, bodies, is_generating=True, is_streaming=True, parse=parse)


class Dialect(Protocol):
    """The routes of one protocol."""

    @property
    def endpoints(self) -> Sequence[Endpoint]: ...

    def error_reply(self, error: ServingError) -> ErrorReply:
        """Status and body of an error before any byte of an answer."""
        ...
