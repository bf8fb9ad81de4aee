"""Clients that speak another version than HTTP/1.1, or offer one: they are answered all the same.

HTTP/1.0 knows no chunks: a body of unknown length ends with its connection.

An offer to change the connection's protocol (`Upgrade: h2c`, `websocket`) is declined, so the answer is HTTP/1.1. A
client that makes such an offer may send a body with it, and expects the request to be answered either way (RFC 9110,
7.8); Java's HTTP client offers h2c by default. The parser takes all that follows the head for the other protocol.
"""

from typing import Any, Protocol

import httptools
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


class Declining(Protocol):
    """What the parser's callbacks have gathered of a request."""

    url: bytes
    headers: list[tuple[bytes, bytes]]  # names in lower case


class DecliningParser(httptools.HttpRequestParser):
    """Parses a request that makes an offer a second time, without it. The callbacks of the first time, in which
    `is_offered` is true, are to be ignored from `on_headers_complete` on.
    """

    def __init__(self, protocol: Declining) -> None:
        super().__init__(protocol)
        self._protocol = protocol

    @property
    def is_offered(self) -> bool:
        """Whether the request makes an offer; CONNECT, which asks for a tunnel, does not."""
        return bool(self.should_upgrade()) and self.get_method() != b"CONNECT"

    def feed_data(self, data: Any) -> None:
        """Raises HttpParserUpgrade behind a CONNECT, HttpParserError."""
        while True:
            try:
                super().feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                if not self.is_offered:
                    raise
                super().feed_data(self._head())
                data = memoryview(data)[offer.args[0] :]
            else:
                return

    def _head(self) -> bytes:
        version = self.get_http_version().encode()
        lines = [b"%b: %b" % field for field in self._protocol.headers if field[0] != b"upgrade"]
        return b"\r\n".join((b"%b %b HTTP/%b" % (self.get_method(), self._protocol.url, version), *lines, b"", b""))
