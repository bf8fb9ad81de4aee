"""The ASGI app: routes, body limits, disconnects, and every error in the shape of its dialect."""

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from kvloom.engine.errors import ServingError, Unavailable
from kvloom.server import sse
from kvloom.server.api.openai import OpenAI, Reply
from kvloom.server.errors import NoRoute, TooLarge, WrongMethod, openai_reply
from kvloom.server.generation import GenerationService

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
    openai: OpenAI,
    max_body_bytes: int,
    on_start: Callable[[], None] = lambda: None,
) -> tuple[Starlette, Health]:
    """The app, and the switch that makes it refuse requests. `on_start` runs on the loop before the first request."""
    health = Health(service)

    async def chat(request: Request) -> Response:
        return await _generate(request, health, max_body_bytes, openai.chat)

    async def completion(request: Request) -> Response:
        return await _generate(request, health, max_body_bytes, openai.completion)

    async def models(request: Request) -> Response:
        return _json(openai.models())

    async def model(request: Request) -> Response:
        return _json(openai.model(request.path_params["name"]))

    async def is_healthy(request: Request) -> Response:
        health.check()
        return Response()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        on_start()
        yield

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completion, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", is_healthy),
        ],
        exception_handlers={ServingError: _on_error, HTTPException: _on_http_error, Exception: _on_bug},
        lifespan=lifespan,
    )
    return app, health


async def _generate(
    request: Request, health: Health, max_body_bytes: int, answer: Callable[[bytes], Coroutine[Any, Any, Reply]]
) -> Response:
    health.check()
    given = request.headers.get("x-request-id", "")
    headers = {"X-Request-Id": given if _REQUEST_ID.match(given) else uuid.uuid4().hex}
    try:
        body = await _read(request, max_body_bytes)
        reply = await _unless_gone(request, answer(body))
    except ClientDisconnect:
        return Response(status_code=_CLIENT_GONE)
    if reply.events is not None:
        return EventResponse(_chunks(reply.events), media_type=sse.MEDIA_TYPE, headers=headers | sse.HEADERS)
    return Response(reply.body, media_type="application/json", headers=headers)


async def _chunks(events: Any) -> AsyncGenerator[bytes]:
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


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Reply]) -> Reply:
    """Await `work`, but cancel it when the client closes the connection. Raises ClientDisconnect then."""
    answer = asyncio.create_task(work)
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


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _error_response(error: ServingError) -> Response:
    reply = openai_reply(error)
    return Response(reply.body, reply.status, reply.headers, media_type="application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    return _error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        response = _error_response(WrongMethod(f"{request.method} is not allowed on {request.url.path}"))
        response.headers.update(error.headers or {})
        return response
    return _error_response(NoRoute(f"there is no route {request.url.path}"))


async def _on_bug(request: Request, error: Exception) -> Response:
    log.error("a request to %s failed", request.url.path, exc_info=error)
    return _error_response(ServingError("the server failed on this request; its log says how"))
