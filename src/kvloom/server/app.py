"""The ASGI app: routes, body limits, disconnects, and every error in the shape of its dialect."""

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from kvloom.engine.errors import ServingError, Unavailable
from kvloom.server import sse
from kvloom.server.errors import ErrorReply, NoRoute, TooLarge, WrongMethod, openai_reply
from kvloom.server.generation import GenerationService
from kvloom.server.reply import Call, Dialect, Endpoint, Events, Reply

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}\Z")
_CLIENT_GONE = 499  # nobody reads it


@dataclass(slots=True)
class Health:
    """Whether new requests are welcome. `is_draining` is set when the server has been told to stop."""

    service: GenerationService
    is_draining: bool = False

    def check(self) -> None:
        """Raises Unavailable."""
        if self.is_draining:
            raise Unavailable("the server is stopping")
        if not self.service.engine.is_ready:
            raise Unavailable("the model is not ready")


class EventResponse(StreamingResponse):
    """Server-sent events; the source is closed whatever ends the response, so that a disconnect cancels."""

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().stream_response(send)


def make_app(
    service: GenerationService,
    dialects: Sequence[Dialect],
    max_body_bytes: int,
    on_start: Callable[[], None] = lambda: None,
) -> tuple[Starlette, Health]:
    """The app, and the switch that makes it refuse requests. `on_start` runs on the loop before the first request."""
    health = Health(service)

    async def is_healthy(request: Request) -> Response:
        health.check()
        return Response()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        on_start()
        yield

    routes = [Route("/health", is_healthy)]
    for dialect in dialects:
        for endpoint in dialect.endpoints:
            handler = _handler(dialect, endpoint, health, max_body_bytes)
            routes.append(Route(endpoint.path, handler, methods=[endpoint.method]))
    app = Starlette(
        routes=routes,
        exception_handlers={ServingError: _on_error, HTTPException: _on_http_error, Exception: _on_bug},
        lifespan=lifespan,
    )
    return app, health


def _handler(
    dialect: Dialect, endpoint: Endpoint, health: Health, max_body_bytes: int
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """The endpoint as starlette wants it; errors in the shape of its dialect."""

    async def handle(request: Request) -> Response:
        try:
            return await _respond(request, endpoint, health, max_body_bytes)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        except ServingError as error:
            return _error_response(dialect.error_reply(error))

    return handle


async def _respond(request: Request, endpoint: Endpoint, health: Health, max_body_bytes: int) -> Response:
    if endpoint.is_generating:
        health.check()
    given = request.headers.get("x-request-id", "")
    request_id = given if _REQUEST_ID.match(given) else uuid.uuid4().hex
    body = await _read(request, max_body_bytes)
    headers = {**dict(request.headers), "x-request-id": request_id}
    call = Call(body, request.path_params, request.query_params, headers)
    reply = await (_unless_gone(request, endpoint.answer(call)) if endpoint.is_generating else endpoint.answer(call))
    answered = {"X-Request-Id": request_id, **reply.headers}
    if reply.events is not None:
        return EventResponse(_chunks(reply.events), media_type=reply.media_type, headers=answered | sse.HEADERS)
    return Response(reply.body, reply.status, answered, reply.media_type)


async def _chunks(events: Events) -> AsyncGenerator[bytes]:
    async with aclosing(events):
        async for chunk in events:
            yield chunk


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
    return _error_response(openai_reply(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        response = _error_response(openai_reply(WrongMethod(f"{request.method} is not allowed on {request.url.path}")))
        response.headers.update(error.headers or {})
        return response
    return _error_response(openai_reply(NoRoute(f"there is no route {request.url.path}")))


async def _on_bug(request: Request, error: Exception) -> Response:
    log.error("a request to %s failed", request.url.path, exc_info=error)
    return _error_response(openai_reply(ServingError("the server failed on this request; its log says how")))
