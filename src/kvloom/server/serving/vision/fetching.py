"""Images fetched over HTTP, only from servers that the configuration names.

A name is resolved once for each hop. Every address that it resolves to must be allowed, and the connection goes to one
of these; a later change of the name has no effect. Proxies of the environment are ignored.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpcore
import httpx

from kvloom.contract.errors import BadRequest, Overloaded
from kvloom.contract.numbers import whole
from kvloom.server.serving.vision.hosts import ImageHosts
from kvloom.server.serving.vision.sources import MAX_IMAGE_BYTES, ImageSource, checked_type

FETCH_S = 15.0  # seconds for one image, redirects included
MAX_REDIRECTS = 3
MAX_AT_ONCE = 16  # images fetched at once
_MAX_WAITING = 256
_MAX_RESOLVED = 8  # names resolved at once
_UNDECLARED = ("", "application/octet-stream", "binary/octet-stream")  # generic types that servers send for any file
_HEADERS = [("Accept", "image/png, image/jpeg, image/webp, image/gif"), ("Accept-Encoding", "identity")]


class _Refused(Exception):
    """Carries the sentence for the caller."""


class _Backend(httpcore.AnyIOBackend):
    """Connects to allowed addresses only. `threads`: resolve names, which may take long."""

    def __init__(self, hosts: ImageHosts, threads: ThreadPoolExecutor) -> None:
        self._hosts, self._threads = hosts, threads

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            resolve = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
            found = await asyncio.get_running_loop().run_in_executor(self._threads, resolve)
        except OSError:
            raise _Refused(f"cannot be fetched: the host {host!r} is not known") from None
        addresses = [str(info[4][0]) for info in found]
        if not all(map(self._hosts.allows_address, addresses)):
            raise _Refused(f"cannot be fetched: the host {host!r} leads to an address that is not allowed")
        for address in addresses[:-1]:
            try:
                return await super().connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await super().connect_tcp(addresses[-1], port, timeout, local_address, socket_options)


class Fetcher:
    """Owned by the loop. `limit_s`: seconds for one image."""

    def __init__(self, hosts: ImageHosts, limit_s: float = FETCH_S) -> None:
        self._hosts, self._limit_s = hosts, limit_s
        self._turn, self._num_waiting = asyncio.Semaphore(MAX_AT_ONCE), 0
        # other work does not wait for a slow name server
        self._threads = ThreadPoolExecutor(_MAX_RESOLVED, "resolving")
        self._tls: ssl.SSLContext | None = None

    async def fetch(self, source: ImageSource, check_total: Callable[[int], None]) -> ImageSource:
        """The source with its file. `check_total(num_bytes)` is called with the bytes so far, and raises BadRequest.

        Raises BadRequest that names the image, Overloaded. When cancelled, it closes its connection.
        """
        if self._num_waiting >= _MAX_WAITING:
            raise Overloaded("too many images are being fetched; try again later")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._limit_s), self._turn:
                return await self._follow(source, check_total)
        except _Refused as problem:
            raise BadRequest(source.name, str(problem)) from None
        except TimeoutError:
            raise BadRequest(source.name, f"could not be fetched within {self._limit_s:g} s") from None
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError, OSError, ValueError):
            raise BadRequest(source.name, "could not be fetched: the connection failed") from None
        finally:
            self._num_waiting -= 1

    async def _follow(self, source: ImageSource, check_total: Callable[[int], None]) -> ImageSource:
        url = self._checked(source.url)
        async with self._pool() as pool:
            for _ in range(MAX_REDIRECTS + 1):
                async with pool.stream("GET", str(url), headers=_HEADERS) as response:
                    if response.status not in (301, 302, 303, 307, 308):
                        return await _image_of(source, response, check_total)
                    location = _header(response, b"location")
                url = self._checked(location, before=url)
        raise _Refused(f"is redirected more than {MAX_REDIRECTS} times")

    def _checked(self, text: str, before: httpx.URL | None = None) -> httpx.URL:
        """Raises _Refused."""
        try:
            url = httpx.URL(text) if before is None else before.join(text)
            host = url.host
        except (httpx.InvalidURL, UnicodeError, ValueError):
            raise _Refused("is no URL") from None
        if url.scheme not in ("http", "https") or not host:
            raise _Refused("leads to what is no http or https URL")
        if before is not None and before.scheme == "https" and url.scheme == "http":
            raise _Refused("is redirected from https to http")
        if url.userinfo:
            raise _Refused("must not hold a user name or a password")
        if not self._hosts.allows(url.raw_host.decode()):
            raise _Refused(f"is not fetched: the host {host!r} is none that this server fetches images from")
        return url

    def _pool(self) -> httpcore.AsyncConnectionPool:
        """A connection pool for one image, so that no connection outlives the checks made for it."""
        self._tls = self._tls or httpcore.default_ssl_context()
        backend = _Backend(self._hosts, self._threads)
        return httpcore.AsyncConnectionPool(ssl_context=self._tls, max_connections=1, network_backend=backend)


async def _image_of(
    source: ImageSource, response: httpcore.Response, check_total: Callable[[int], None]
) -> ImageSource:
    """Raises BadRequest, _Refused."""
    if response.status != 200:
        raise _Refused(f"could not be fetched: its server answers {response.status}")
    if _header(response, b"content-encoding").lower() not in ("", "identity"):
        raise _Refused("could not be fetched: its server sends it compressed, which was not asked for")
    kind = _header(response, b"content-type").partition(";")[0].strip().lower()
    declared = "" if kind in _UNDECLARED else checked_type(kind, source.name)
    length = _header(response, b"content-length")
    data = bytearray()
    async for piece in response.aiter_stream():
        check_total(len(piece))
        data += piece
        if len(data) > MAX_IMAGE_BYTES or (length and whole(length, MAX_IMAGE_BYTES) is None):
            raise _Refused(f"is larger than {MAX_IMAGE_BYTES} bytes")
    if not data:
        raise _Refused("is empty")
    return ImageSource(source.name, bytes(data), declared)


def _header(response: httpcore.Response, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in response.headers if key.lower() == name), "")
