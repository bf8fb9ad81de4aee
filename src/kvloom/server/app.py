"""The ASGI app: routes, body limits, disconnects, and every error in the shape of its dialect."""

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from kvloom.engine.errors import ServingError
from kvloom.server import sse
from kvloom.server.auth import TENANT
from kvloom.server.errors import BUG_TEXT, ErrorReply, NoRoute, TooLarge, WrongMethod, reply_for_path
from kvloom.server.health import Health
from kvloom.server.logs import current_request_id
from kvloom.server.reply import Call, Dialect, Endpoint, Reply

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}\Z")
_CLIENT_GONE = 499  # nobody reads it


class EventResponse(StreamingResponse):
    """Server-sent events; the source is closed whatever ends the response, so that a disconnect cancels."""

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in self.body_iterator:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def make_app(
    health: Health,
    dialects: Sequence[Dialect],
    max_body_bytes: int,
    on_start: Callable[[], None] = lambda: None,
    management_port: int | None = None,
) -> Starlette:
    """The app. `on_start` runs on the loop before the first request.

    With a `management_port`, management routes exist on that port only, and the others everywhere else; the console's
    page is on both.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        on_start()
        yield

    routes = []
    for dialect in dialects:
        for endpoint in dialect.endpoints:
            handler = _handler(dialect, endpoint, health, max_body_bytes, management_port)
            routes.append(Route(endpoint.path, handler, methods=[endpoint.method]))
    return Starlette(
        routes=routes,
        exception_handlers={ServingError: _on_error, HTTPException: _on_http_error, Exception: _on_bug},
        lifespan=lifespan,
    )


def _handler(
    dialect: Dialect, endpoint: Endpoint, health: Health, max_body_bytes: int, management_port: int | None
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """The endpoint as starlette wants it; errors in the shape of its dialect."""

    async def handle(request: Request) -> Response:
        given = request.headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.match(given) else uuid.uuid4().hex
        current_request_id.set(request_id)
        try:
            if management_port is not None:
                _check_port(request, endpoint, management_port)
            response = await _respond(request, endpoint, health, max_body_bytes, request_id)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        except ServingError as error:
            log.info("%s %s: %s", request.method, request.url.path, error)
            response = _error_response(dialect.error_reply(error))
        response.headers["X-Request-Id"] = request_id
        return response

    return handle


def _check_port(request: Request, endpoint: Endpoint, management_port: int) -> None:
    """Raises NoRoute when this route is not on the port that the request came in by."""
    is_here = request.scope["server"][1] == management_port
    if endpoint.is_management != is_here and not endpoint.is_everywhere:
        raise NoRoute(f"there is no route {request.url.path} on this port")


async def _respond(
    request: Request, endpoint: Endpoint, health: Health, max_body_bytes: int, request_id: str
) -> Response:
    if endpoint.is_generating:
        health.check_live()
    body = await _read(request, max_body_bytes)
    headers = {**dict(request.headers), "x-request-id": request_id}
    call = Call(body, request.path_params, request.query_params, headers, request.scope.get(TENANT, ""))
    reply = await (_unless_gone(request, endpoint.answer(call)) if endpoint.is_generating else endpoint.answer(call))
    if reply.events is not None:
        return EventResponse(reply.events, media_type=reply.media_type, headers={**reply.headers, **sse.HEADERS})
    return Response(reply.body, reply.status, reply.headers, reply.media_type)


async def _read(request: Request, max_bytes: int) -> bytes:
    """The body. Raises TooLarge as soon as it is known to be."""
    too_large = TooLarge(f"the request body is larger than {max_bytes} bytes")
    if int(request.headers.get("content-length", "0")) > max_bytes:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


async def _unless_gone(request: Request, work: Awaitable[Reply]) -> Reply:
    """Await `work`, but cancel it when the client closes the connection. Raises ClientDisconnect then."""
    answer = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnect(request.receive))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        for task in (answer, gone):
            task.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)


async def _disconnect(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _error_response(reply: ErrorReply) -> Response:
    return Response(reply.body, reply.status, reply.headers, media_type="application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    return _error_response(reply_for_path(request.url.path, error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        response = _error_response(reply_for_path(path, WrongMethod(f"{request.method} is not allowed on {path}")))
        response.headers.update(error.headers or {})
        return response
    return _error_response(reply_for_path(path, NoRoute(f"there is no route {path}")))


async def _on_bug(request: Request, error: Exception) -> Response:
    log.error("a request to %s failed", request.url.path, exc_info=error)
    return _error_response(reply_for_path(request.url.path, ServingError(BUG_TEXT)))
