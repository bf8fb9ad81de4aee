"""What a dialect is given and what it gives back: neutral of any web framework.

A dialect is a list of endpoints and the shape of its errors; app.py mounts them.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvloom.engine.errors import ServingError
from kvloom.server.errors import BUG_TEXT, ErrorReply

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request: its body whole, its path parameters by name, query and headers (lower-case names).

    The header `x-request-id` is always there, the client's or made up.
    """

    body: bytes = b""
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    tenant: str = ""  # whose API key it came with


class Events:
    """A stream of chunks whose first one is there already: an error before it raises, so that it gets a status.

    A later error becomes what `on_error` makes of it; `end` comes last. Closing it cancels the generation.
    """

    def __init__(
        self, first: bytes, rest: AsyncGenerator[bytes], on_error: Callable[[ServingError], bytes], end: bytes
    ) -> None:
        self._ready = [first]
        self._rest = rest
        self._on_error, self._end = on_error, end
        self._is_done = False

    @classmethod
    async def begin(
        cls, chunks: AsyncGenerator[bytes], on_error: Callable[[ServingError], bytes], end: bytes = b""
    ) -> "Events":
        """Wait for the first chunk. Raises ServingError."""
        try:
            return cls(await anext(chunks), chunks, on_error, end)
        except BaseException:
            await chunks.aclose()
            raise

    def __aiter__(self) -> "Events":
        return self

    async def __anext__(self) -> bytes:
        if self._ready:
            return self._ready.pop()
        if self._is_done:
            raise StopAsyncIteration
        try:
            return await anext(self._rest)
        except StopAsyncIteration:
            self._is_done = True
            if self._end:
                return self._end
            raise
        except ServingError as error:
            self._is_done = True
            return self._on_error(error) + self._end
        except Exception:  # our mistake; the client is told all the same
            log.exception("a stream failed")
            self._is_done = True
            return self._on_error(ServingError(BUG_TEXT)) + self._end

    async def aclose(self) -> None:
        await self._rest.aclose()


@dataclass(frozen=True, slots=True)
class Reply:
    """Either a whole body or a stream of chunks."""

    body: bytes = b""
    events: Events | None = None
    status: int = 200
    media_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One route. `is_generating`: refused while the server drains, cancelled with its client.

    `is_management`: moves to the management port when there is one; `is_everywhere`: is on both. `summary`, `bodies`
    (the structs that parse the body; any of them) and `is_streaming` are for the documentation.
    """

    method: str
    path: str  # as starlette writes it: "/v1/models/{name}"
    answer: Callable[[Call], Awaitable[Reply]]
    summary: str = ""
    bodies: tuple[type, ...] = ()
    is_generating: bool = False
    is_management: bool = False
    is_everywhere: bool = False
    is_streaming: bool = False


class Dialect(Protocol):
    """One family of routes."""

    @property
    def endpoints(self) -> Sequence[Endpoint]: ...

    def error_reply(self, error: ServingError) -> ErrorReply:
        """Status and body of an error before anything was answered."""
        ...
