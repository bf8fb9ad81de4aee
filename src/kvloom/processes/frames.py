"""Messages of any size in a byte stream: each is a length (u32, little-endian) and that many bytes. No I/O.

Used between our own processes: an engine and its ranks, a daemon and its workers, a server and its parsers.
"""

import struct

HEAD = struct.Struct("<I")


def frame(body: bytes) -> bytes:
    """The bytes to send for `body`."""
    return HEAD.pack(len(body)) + body


class FrameBuffer:
    """Bytes received and not taken yet."""

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def is_whole(self) -> bool:
        """Whether the next message is complete, so that `take` may be called."""
        return len(self._data) >= HEAD.size and len(self._data) >= self._end()

    def feed(self, data: bytes) -> None:
        """Add bytes, cut anywhere."""
        self._data += data

    def take(self) -> bytes:
        """The next message; call only when it is complete."""
        end = self._end()
        body = bytes(self._data[HEAD.size : end])
        del self._data[:end]
        return body

    def _end(self) -> int:
        return HEAD.size + int(HEAD.unpack_from(self._data)[0])
