"""Frames between libqos.so and the daemon: a header line `op a b c d length`, then `length` bytes. No I/O.

a to d are unsigned 32-bit numbers. Who sends what:

  client  H protocol - - -              hello, before anything else
          C call session errno qos JSON create a session; the descriptor of the model comes with it, or why the client
                                        could not open the path; qos is the thread's level + 1, 0 = none was set
          S call session request qos JSON   submit
          A -    session request -      abort; has no answer
          D call session - -            destroy
          Q call -       - -            status
  daemon  H protocol - - -              the answer to a hello
          r call error session request text  the answer to a call, with what it names when it is OK; the status as JSON
                                        when asked for. A client that has given the call up ends what it names
          e session request is_final -  JSON   a reply to a request

Protocol 1 had no hello, and the daemon opened the path. A side that receives another protocol number, or a call before
a hello, logs that in one line, answers NOSYS, and does nothing else.
"""

from dataclasses import dataclass

PROTOCOL = 2  # as c/internal.h has it
MAX_PAYLOAD_BYTES = 16 << 20
_MAX_HEADER_BYTES = 80
_MAX_NUMBER = 2**32 - 1


class FrameError(Exception):
    """The peer does not speak this protocol; its stream cannot be read any further."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message; what the numbers mean depends on `op`, see above."""

    op: str  # one ASCII letter
    a: int = 0
    b: int = 0
    c: int = 0
    d: int = 0
    payload: bytes = b""


def encode(frame: Frame) -> bytes:
    """The bytes to send."""
    return b"%s %d %d %d %d %d\n" % (
        frame.op.encode(),
        frame.a,
        frame.b,
        frame.c,
        frame.d,
        len(frame.payload),
    ) + bytes(frame.payload)


class FrameDecoder:
    """Takes bytes cut anywhere, returns whole frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._header: tuple[Frame, int] | None = None  # header of a frame whose payload is not complete yet

    @property
    def is_inside(self) -> bool:
        """Whether a frame has begun and is not complete."""
        return self._header is not None or bool(self._buffer)

    @property
    def length(self) -> int:
        """Length of its payload; 0 until its header is complete."""
        return 0 if self._header is None else self._header[1]

    def feed(self, data: bytes) -> None:
        """Add bytes, cut anywhere."""
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
