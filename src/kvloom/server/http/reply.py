"""What a dialect is given and what it gives back: neutral of any web framework.

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
    """One HTTP request: its body whole, its path parameters by name, query and headers (lower-case names).

    The header `x-request-id` is always there, the client's or made up.
    """

    body: bytes | bytearray = b""
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    tenant: str = ""  # whose API key it came with
    more: Sequence[bytes] | None = None  # what the endpoint has fetched for it
    seen: Seen | None = None  # what the engine has made of its images
    time_s: float = field(default_factory=time.time)  # when it came, since the epoch

    @property
    def num_bytes(self) -> int:
        """Of what is to be parsed."""
        return len(self.body) + sum(map(len, self.more or ()))


@dataclass(frozen=True, slots=True)
class Fetch:
    """What `parse` gives when the request alone is not enough: `key` says what the endpoint is to fetch."""

    key: Any


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole body; or with `frames` the first frames of a stream, whose others they are."""

    body: bytes = b""
    frames: AsyncGenerator[bytes] | None = None
    status: int = 200
    media_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One route. `is_generating`: refused while the server drains, cancelled with its client.

    `parse` makes of a request a Reply, or a Job (job.py) that is run; or, where there is an `answer`, what that is then
    given beside the request, whose body is gone by then. It waits for nothing and touches only its arguments and the
    models, so that a large body can be parsed in another process (parsing.py); what it returns can be pickled. When it
    returns a Fetch, `fetch` is awaited with the request and the key, and `parse` is asked again, with request.more.
    Without `parse` `answer` is given the request alone, and reads no body.
    `is_early`: answers while the models are being loaded, too, and so asks for none of them.
    `is_management`: moves to the management port when there is one; `is_everywhere`: is on both; `is_metrics`: moves to
    the port of metrics when there is one. `summary`, `bodies`
    (the structs that parse the body; any of them) and `is_streaming` are for the documentation.
    """

    method: str
    path: str  # as starlette writes it: "/v1/models/{name}"
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
    """One family of routes."""

    @property
    def endpoints(self) -> Sequence[Endpoint]: ...

    def error_reply(self, error: ServingError) -> ErrorReply:
        """Status and body of an error before anything was answered."""
        ...
