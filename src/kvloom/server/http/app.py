"""The ASGI app: routes, body limits, disconnects, and every error in the shape of its dialect."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from kvloom.contract.errors import ServingError
from kvloom.server.errors import BUG_TEXT, ErrorReply, NoRoute, TooLarge, WrongMethod, reply_for_path
from kvloom.server.http import sse
from kvloom.server.http.job import Job
from kvloom.server.http.job import answer as run_job
from kvloom.server.http.parsing import INLINE_BYTES, Parsing
from kvloom.server.http.reply import Dialect, Endpoint, Fetch, HttpRequest, Reply
from kvloom.server.http.unpacking import Unpacker
from kvloom.server.observe.logs import current_request_id
from kvloom.server.request_ids import request_id_of, with_id
from kvloom.server.secure.key_guard import TENANT
from kvloom.server.serving.health import Health
from kvloom.server.serving.vision.hosts import ImageHosts
from kvloom.server.serving.vision.looking import Looking
from kvloom.server.serving.vision.seen import Look

log = logging.getLogger(__name__)

Answer = Callable[[HttpRequest], Awaitable[Reply]]
T = TypeVar("T")

_CLIENT_GONE = 499  # the client is gone: no one reads this status


@dataclass(frozen=True, slots=True)
class AppSettings:
    """`on_start` runs on the loop before the first request.

    With a `management_port`, management routes exist on that port only and all others everywhere else; the console's
    page is on both. With a `metrics_port`, the routes for Prometheus exist there alone, and no others.
    """

    max_body_bytes: int
    on_start: Callable[[], None] = lambda: None
    management_port: int | None = None
    metrics_port: int | None = None
    image_hosts: ImageHosts = field(default_factory=ImageHosts)  # that images are fetched from


class FrameResponse(StreamingResponse):
    """A stream of frames. Its source is closed however the response ends, so a disconnect cancels the request."""

    def __init__(
        self, first: bytes, frames: AsyncGenerator[bytes], media_type: str, headers: Mapping[str, str]
    ) -> None:
        super().__init__(frames, media_type=media_type, headers=headers)
        self._first, self._frames = first, frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await _unless_gone(receive, self.stream_response(send))

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._frames) as frames:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for frame in frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def make_app(health: Health, dialects: Sequence[Dialect], settings: AppSettings, parsing: Parsing) -> ASGIApp:
    """The app. `parsing` is closed with it."""
    looking = Looking(settings.image_hosts)

    @asynccontextmanager
    async def lifespan(app: ASGIApp) -> AsyncIterator[None]:
        settings.on_start()
        yield
        await asyncio.to_thread(parsing.close)

    routes = []
    for dialect in dialects:
        for endpoint in dialect.endpoints:
            handler = _Handler(dialect, endpoint, _answer(endpoint, parsing, looking), health, settings)
            routes.append(Route(endpoint.path, handler, methods=[endpoint.method]))
    return _App(Router(routes, lifespan=lifespan))


class _App:
    """The routes, and the answer where there is none. Responses call the server's `send` directly: starlette's own
    application would put three functions in between, each called for every event of a stream.
    """

    def __init__(self, router: Router) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # set so that the router raises for unknown paths
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            await with_id(scope, _no_route(scope, error))(scope, receive, send)


def _answer(endpoint: Endpoint, parsing: Parsing, looking: Looking) -> Answer:
    """Parse the body, free it, and let the endpoint answer."""
    if endpoint.parse is None:
        assert endpoint.answer is not None, "an endpoint that parses nothing answers"
        return endpoint.answer

    async def answer(request: HttpRequest) -> Reply:
        bare = replace(request, body=b"")
        try:
            parsed = await parsing.parse(endpoint, request)
            if isinstance(parsed, Fetch):
                assert endpoint.fetch is not None
                request = replace(request, more=await endpoint.fetch(request, parsed.key))
                parsed = await parsing.parse(endpoint, request)
            if isinstance(parsed, Look):
                request = replace(request, seen=await looking.see(parsed, request.tenant))
                parsed = await parsing.parse(endpoint, request)
        except ServingError as error:
            raise _forgetful(error)  # noqa: B904  # what it came from holds the body
        finally:
            del request
        if endpoint.answer is not None:
            return await endpoint.answer(bare, parsed)
        return await run_job(parsed) if isinstance(parsed, Job) else parsed

    return answer


def _forgetful(error: ServingError) -> ServingError:
    """The error without traceback frames: they hold the body, and form a cycle with the error."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


@dataclass(frozen=True, slots=True)
class _Handler:
    """One endpoint as an ASGI app; errors in the shape of its dialect."""

    dialect: Dialect
    endpoint: Endpoint
    answer: Answer
    health: Health
    settings: AppSettings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._answered(Request(scope, receive))
        await response(scope, receive, send)

    async def _answered(self, request: Request) -> Response:
        request_id = request_id_of(request.scope)
        current_request_id.set(request_id)
        try:
            self._check_port(request)
            if not self.endpoint.is_early:
                self.health.check_loaded()
            response = await self._respond(request, request_id)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        except ServingError as error:
            log.info("%s %s: %s", request.method, request.url.path, error)
            response = _error_response(self.dialect.error_reply(error))
        except Exception as error:  # a bug of ours; answered here, since uvicorn would close the connection
            log.error("a request to %s failed", request.url.path, exc_info=error)
            response = _error_response(self.dialect.error_reply(ServingError(BUG_TEXT)))
        return with_id(request.scope, response)

    def _check_port(self, request: Request) -> None:
        """Raises NoRoute when this route does not exist on the port that the request came to."""
        port, settings, endpoint = request.scope["server"][1], self.settings, self.endpoint
        if settings.metrics_port is not None and (endpoint.is_metrics or port == settings.metrics_port):
            is_here = endpoint.is_metrics and port == settings.metrics_port
        elif settings.management_port is None or endpoint.is_everywhere:
            return
        else:
            is_here = endpoint.is_management == (port == settings.management_port)
        if not is_here:
            raise NoRoute(f"there is no route {request.url.path} on this port")

    async def _respond(self, request: Request, request_id: str) -> Response:
        endpoint = self.endpoint
        if endpoint.is_generating:
            self.health.check_live()
        received = await _receive(request, self.settings.max_body_bytes, request_id)
        is_cancelled = endpoint.is_generating or endpoint.parse is not None
        work = self.answer(received)
        del received  # a large body is freed once it is parsed
        reply = await (_unless_gone(request.receive, work) if is_cancelled else work)
        if reply.frames is not None:
            return FrameResponse(reply.body, reply.frames, reply.media_type, {**reply.headers, **sse.HEADERS})
        return Response(reply.body, reply.status, reply.headers, reply.media_type if reply.body else None)


async def _receive(request: Request, max_body_bytes: int, request_id: str) -> HttpRequest:
    """Raises TooLarge, WrongEncoding, BadRequest."""
    body = await _read(request, max_body_bytes)
    headers = {**dict(request.headers), "x-request-id": request_id}
    tenant = request.scope.get(TENANT, "")
    return HttpRequest(body, dict(request.path_params), dict(request.query_params), headers, tenant)


async def _read(request: Request, max_bytes: int) -> bytes | bytearray:
    """The body, decompressed; a large one is not copied.

    Raises TooLarge as soon as that is known, WrongEncoding, BadRequest.
    """
    too_large = TooLarge(f"the request body is larger than {max_bytes} bytes")
    if int(request.headers.get("content-length", "0")) > max_bytes:
        raise too_large
    coding = request.headers.get("content-encoding", "identity")
    unpacker = None if coding.strip().lower() in ("", "identity") else Unpacker(coding)
    body = bytearray()
    async for chunk in request.stream():
        for piece in (chunk,) if unpacker is None else unpacker.feed(chunk):
            body += piece
            if len(body) > max_bytes:
                raise too_large
            if unpacker is not None:
                await asyncio.sleep(0)  # a small body may decompress to many pieces
    if unpacker is not None:
        unpacker.finish()
    return bytes(body) if len(body) <= INLINE_BYTES else body


async def _unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`; when the client disconnects, cancel it and raise ClientDisconnect."""
    answer = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        for task in (answer, gone):
            task.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _error_response(reply: ErrorReply) -> Response:
    return Response(reply.body, reply.status, reply.headers, media_type="application/json")


def _no_route(scope: Scope, error: HTTPException) -> Response:
    request = Request(scope)
    path = request.url.path
    if error.status_code == 405:
        response = _error_response(reply_for_path(path, WrongMethod(f"{request.method} is not allowed on {path}")))
        response.headers.update(error.headers or {})
        return response
    return _error_response(reply_for_path(path, NoRoute(f"there is no route {path}")))
