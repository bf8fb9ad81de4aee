"""Messages of any size in a stream of bytes: each one is a length (u32, little-endian) and that many bytes. No I/O.

This is how processes of one machine speak that trust each other: an engine and its ranks, a daemon and its workers.
"""

import struct

_LENGTH = struct.Struct("<I")


def frame(body: bytes) -> bytes:
    """The bytes to send for `body`."""
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """What has been received and not yet taken out."""

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def is_whole(self) -> bool:
        """Whether the next message is here to its last byte: `take` may be called."""
        return len(self._data) >= _LENGTH.size and len(self._data) >= self._end()

    def feed(self, data: bytes) -> None:
        """Bytes in any pieces, as they arrive."""
        self._data += data

    def take(self) -> bytes:
        """The next message; only when it is whole."""
        end = self._end()
        body = bytes(self._data[_LENGTH.size : end])
        del self._data[:end]
        return body

    def _end(self) -> int:
        return _LENGTH.size + int(_LENGTH.unpack_from(self._data)[0])
