"""Server-sent events (WHATWG HTML, 9.2): the framing of chunks."""

import msgspec

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients skip
KEEP_ALIVE_S = 5.0  # of silence
MEDIA_TYPE = "text/event-stream"
NDJSON = "application/x-ndjson"  # the alternative: a line of JSON for each chunk


def event(data: bytes) -> bytes:
    """One event; `data` is JSON and so contains no line break."""
    return b"data: " + data + b"\n\n"


class TextFrame:
    """Frames of a stream that differ in one text: everything around it is encoded once."""

    def __init__(self, frame: bytes) -> None:
        """`frame`: its last empty JSON string is where the text goes."""
        self._before, _, self._after = frame.rpartition(b'""')

    def of(self, text: str) -> bytes:
        return self._before + _encode(text) + self._after


def named_event(name: str, data: bytes) -> bytes:
    """One event with a name, as `event`."""
    return b"event: " + name.encode() + b"\n" + event(data)
