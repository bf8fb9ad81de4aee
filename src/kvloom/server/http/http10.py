"""Answers to clients of HTTP/1.0, which know no chunks: a body of unknown length ends with its connection."""

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> Any:
    """ASGI: `app` for the one request of `cycle`, which closes its connection behind the answer in any case."""
    cycle.waiting_for_100_continue = False  # to be ignored of such a client (RFC 9110, 10.1.1)
    has_length = True

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, sent)

    return answered
