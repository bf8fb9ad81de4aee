"""Server-sent events of generate_stream: bytes in, texts out; no socket.

    data:{"text_output": "am", ...}      a piece of text         data:{"error": "..."}   the request failed
    data:[DONE], ": comment", "event: x"  ignored                 {"error": ...} or text  the request failed

The last row is sent by some servers of this protocol when a token takes too long.
"""

import json
from typing import Any

from mindieclient.python.httpclient.errors import MindIEClientException

MAX_LINE_BYTES = 16 * 1024 * 1024
_FIELDS_WITHOUT_TEXT = (b"event:", b"id:", b"retry:", b":")


class EventReader:
    """Reads the events of one answer, cut into pieces anywhere. Raises MindIEClientException for a failed request."""

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, data: bytes) -> list[str]:
        """Texts of the events that are complete now, without empty ones. Raises an error event's error."""
        lines = (self._tail + data).split(b"\n")
        self._tail = lines.pop()
        if len(self._tail) > MAX_LINE_BYTES:
            raise MindIEClientException(f"the server sent a line of more than {MAX_LINE_BYTES} bytes")
        return [text for line in lines if (text := _text_of(line.strip()))]

    def finish(self) -> list[str]:
        """Texts of a last line without a line end."""
        last, self._tail = self._tail, b""
        text = _text_of(last.strip())
        return [text] if text else []


def _text_of(line: bytes) -> str:
    if not line or line.startswith(_FIELDS_WITHOUT_TEXT):
        return ""
    if not line.startswith(b"data:"):
        raise MindIEClientException(f"the server ended the stream: {line[:500].decode(errors='replace')}")
    payload = line.removeprefix(b"data:").strip()
    if payload in (b"", b"[DONE]"):
        return ""
    try:
        event: Any = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise MindIEClientException("the server sent an event that is not JSON") from error
    if not isinstance(event, dict):
        raise MindIEClientException("the server sent an event that is not a JSON object")
    if "error" in event:
        raise MindIEClientException(f"the server ended the stream: {event['error']}")
    text = event.get("text_output", "")
    return text if isinstance(text, str) else ""
