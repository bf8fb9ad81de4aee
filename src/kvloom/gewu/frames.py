"""Frames between libqos.so and the daemon: a header line `op a b c d length` and `length` bytes. No I/O.

a to d are unsigned 32-bit numbers. Who sends what:

  client  C call session - qos   JSON   create a session; qos is the thread's level + 1, 0 = none was set
          F call errno   - -            the path was opened (the descriptor comes with it) or not
          S call session request qos JSON   submit
          A -    session request -      abort; has no answer
          D call session - -            destroy
          Q call -       - -            status
  daemon  o call -       - -     path   open this path for me
          r call error   - -     text   the answer to a call; the status as JSON when asked for
          e session request is_final -  JSON   a reply to a request
"""

from dataclasses import dataclass

MAX_PAYLOAD_BYTES = 16 << 20
_MAX_HEADER_BYTES = 80
_MAX_NUMBER = 2**32 - 1


class FrameError(Exception):
    """The other side does not speak this protocol; nothing after it can be read."""


@dataclass(frozen=True, slots=True)
class Frame:
    op: str  # one ASCII letter
    a: int = 0
    b: int = 0
    c: int = 0
    d: int = 0
    payload: bytes = b""


def encode(frame: Frame) -> bytes:
    return b"%s %d %d %d %d %d\n" % (
        frame.op.encode(),
        frame.a,
        frame.b,
        frame.c,
        frame.d,
        len(frame.payload),
    ) + bytes(frame.payload)


class FrameDecoder:
    """Bytes in any pieces in, frames out."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._header: tuple[Frame, int] | None = None  # read, its payload not yet complete

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next_frame(self) -> Frame | None:
        """The next whole frame, None when more bytes are needed. Raises FrameError."""
        if self._header is None:
            end = self._buffer.find(b"\n", 0, _MAX_HEADER_BYTES)
            if end < 0:
                if len(self._buffer) >= _MAX_HEADER_BYTES:
                    raise FrameError("the header is too long")
                return None
            self._header = _parse_header(bytes(self._buffer[:end]))
            del self._buffer[: end + 1]
        frame, length = self._header
        if len(self._buffer) < length:
            return None
        payload = bytes(self._buffer[:length])
        del self._buffer[:length]
        self._header = None
        return Frame(frame.op, frame.a, frame.b, frame.c, frame.d, payload)


def _parse_header(line: bytes) -> tuple[Frame, int]:
    parts = line.split(b" ")
    if len(parts) != 6 or len(parts[0]) != 1 or not parts[0].isalpha() or not all(p.isdigit() for p in parts[1:]):
        raise FrameError(f"not a header: {line!r}")
    a, b, c, d, length = (int(part) for part in parts[1:])
    if max(a, b, c, d) > _MAX_NUMBER or length > MAX_PAYLOAD_BYTES:
        raise FrameError(f"a number is out of range: {line!r}")
    return Frame(parts[0].decode(), a, b, c, d), length
