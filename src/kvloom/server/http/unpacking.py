"""Compressed bodies (Content-Encoding gzip or deflate), decompressed piece by piece within the body's limit."""

import zlib
from collections.abc import Iterator

from kvloom.contract.errors import BadRequest
from kvloom.server.errors import CODINGS, WrongEncoding

_PIECE = 1 << 18  # bytes decompressed at once: about a millisecond
_AUTO, _RAW = zlib.MAX_WBITS | 32, -zlib.MAX_WBITS  # gzip or zlib by their header; deflate without one


class Unpacker:
    """Takes a compressed body as it arrives. `feed` yields pieces of at most 256 KiB; call `finish` at the end."""

    def __init__(self, coding: str) -> None:
        """`coding`: the value of Content-Encoding. Raises WrongEncoding."""
        if coding.strip().lower() not in ("gzip", "x-gzip", "deflate"):
            raise WrongEncoding(f"the content encoding {coding[:40]!r} is not supported; send {CODINGS} or none")
        self._is_gzip = "gzip" in coding.lower()
        self._start = b""  # the first bytes, until the format is known
        self._stream: zlib._Decompress | None = None
        self._is_begun = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The decompressed bytes that `data` adds. Raises BadRequest when it is damaged."""
        try:
            while data:
                data = self._begin(data)
                while data and self._stream is not None and not self._stream.eof:
                    piece = self._stream.decompress(data, _PIECE)
                    data = self._stream.unconsumed_tail
                    if piece:
                        yield piece
                if self._stream is not None and self._stream.eof:
                    data, self._stream = self._stream.unused_data, None
        except zlib.error as error:
            raise BadRequest("", f"the packed body cannot be unpacked: {error}") from None

    def finish(self) -> None:
        """Raises BadRequest when the body is not complete."""
        if self._stream is not None or self._start:
            raise BadRequest("", "the packed body ends before its end")

    def _begin(self, data: bytes) -> bytes:
        """Open the stream, or the next member of a gzip body, as soon as two bytes determine the format."""
        if self._stream is not None:
            return data
        if self._is_begun and not self._is_gzip:
            raise BadRequest("", "the packed body goes on after its end")
        data, self._start = self._start + data, b""
        if len(data) < 2:
            self._start = data
            return b""
        has_header = self._is_gzip or (data[0] & 0x0F == 8 and int.from_bytes(data[:2]) % 31 == 0)
        self._stream = zlib.decompressobj(_AUTO if has_header else _RAW)
        self._is_begun = True
        return data
