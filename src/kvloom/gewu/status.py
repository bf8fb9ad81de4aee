"""A daemon's status, read by a client of the frames without libqos.so."""

import json
import socket
from pathlib import Path
from typing import Any

from kvloom.gewu.codes import Code
from kvloom.gewu.protocol.frames import PROTOCOL, Frame, FrameDecoder, FrameError, encode

_TIMEOUT_S = 5.0
_READ_BYTES = 1 << 16


def ask_status(path: Path) -> dict[str, Any]:
    """The status of the daemon that listens on `path`. Raises OSError when there is none with this protocol."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_TIMEOUT_S)
        sock.connect(str(path))
        decoder = FrameDecoder()
        sock.sendall(encode(Frame("H", PROTOCOL)))
        hello = _receive(sock, decoder)
        if hello.op != "H" or hello.a != PROTOCOL:
            raise ConnectionError(f"it speaks protocol {hello.a}, this program {PROTOCOL}")
        sock.sendall(encode(Frame("Q", 1)))
        answer = _receive(sock, decoder)
        if answer.op != "r":
            raise ConnectionError("it does not speak Gewu's protocol")
        if answer.b != Code.OK:
            raise ConnectionError(answer.payload.decode(errors="replace"))
        found: dict[str, Any] = json.loads(answer.payload)
        return found


def _receive(sock: socket.socket, decoder: FrameDecoder) -> Frame:
    try:
        while (frame := decoder.next_frame()) is None:
            data = sock.recv(_READ_BYTES)
            if not data:
                raise ConnectionError("it ended the connection; before a hello, it speaks protocol 1")
            decoder.feed(data)
    except TimeoutError:
        raise ConnectionError("it is stopped or overloaded") from None
    except FrameError as error:
        raise ConnectionError(f"it does not speak Gewu's protocol: {error}") from None
    return frame
