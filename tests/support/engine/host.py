"""Engine hosts that follow a script: `python host.py SCRIPT FD`. Implements the wire protocol independently."""

import os
import signal
import socket
import struct
import sys
from collections.abc import Callable

CONTINUE, EOS = 0, 1
OK, INVALID_ARG = 0, 2


class Library:
    """The library's end of the connection."""

    def __init__(self, fd: int) -> None:
        self._sock = socket.socket(fileno=fd)

    def receive(self) -> tuple[str, bytes]:
        """The letter and the fields of a message. Ends the process when the library has disconnected."""
        (length,) = struct.unpack("=I", self._read(4))
        message = self._read(length)
        return chr(message[0]), message[1:]

    def expect(self, letter: str) -> bytes:
        found, fields = self.receive()
        if found != letter:
            sys.exit(f"{found} came in place of {letter}")
        return fields

    def write(self, data: bytes) -> None:
        self._sock.sendall(data)

    def send(self, letter: str, fields: bytes = b"") -> None:
        self.write(struct.pack("=I", 1 + len(fields)) + letter.encode() + fields)

    def hello(self, protocol: int = 1) -> None:
        self.expect("H")
        self.send("H", struct.pack("=II", protocol, 3) + b"9.9")

    def answer(self, call: bytes, code: int = OK, message: bytes = b"", values: tuple[int, ...] = ()) -> None:
        body = call[:4] + struct.pack("=BI", code, len(message)) + message
        self.send("a", body + struct.pack(f"=I{len(values)}Q", len(values), *values))

    def respond(self, request: bytes, flag: int, *ids: int) -> None:
        """Sends an answer; `request` are the fields of its R message."""
        self.send("e", request[4:12] + struct.pack(f"=BII{len(ids)}q", flag, 0, len(ids), *ids))

    def open(self) -> None:
        self.hello()
        self.answer(self.expect("I"), values=(4,))

    def begin(self) -> bytes:
        """Answers the load, then accepts and returns a request."""
        self.open()
        request = self.expect("R")
        self.answer(request)
        return request

    def serve(self) -> None:
        """Accepts requests, answers each with one token, and answers calls."""
        while True:
            letter, fields = self.receive()
            if fields[:4] != bytes(4):
                self.answer(fields, values=(7, 8, 9) if letter == "Q" else ())
            if letter == "R":
                self.respond(fields, CONTINUE, 5)

    def _read(self, length: int) -> bytes:
        found = b""
        while len(found) < length:
            data = self._sock.recv(length - len(found))
            if not data:
                sys.exit()
            found += data
        return found


def silent(library: Library) -> None:
    while True:
        library.receive()


def stranger(library: Library) -> None:
    library.hello(protocol=2)


def leaves(library: Library) -> None:
    sys.exit(3)


def garbage(library: Library) -> None:
    library.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    silent(library)


def answers_before_hello(library: Library) -> None:
    library.answer(bytes(4))
    silent(library)


def refuses(library: Library) -> None:
    library.hello()
    library.answer(library.expect("I"), INVALID_ARG, b"modelWeightPath: is missing")
    silent(library)


def dies_loading(library: Library) -> None:
    library.hello()
    library.expect("I")
    os.kill(os.getpid(), signal.SIGKILL)


def serves(library: Library) -> None:
    library.open()
    library.serve()


def dies_unanswered(library: Library) -> None:
    library.open()
    library.expect("R")
    sys.exit(4)


def responds_and_dies(library: Library) -> None:
    """Exits before it answers the call."""
    library.open()
    library.respond(library.expect("R"), CONTINUE, 5)
    sys.exit(5)


def dies_running(library: Library) -> None:
    library.respond(library.begin(), CONTINUE, 5)
    sys.exit(6)


def ends_twice(library: Library) -> None:
    request = library.begin()
    unknown = request[:4] + struct.pack("=Q", 12345)
    for found, flag in ((unknown, EOS), (request, EOS), (request, EOS), (request, CONTINUE)):
        library.respond(found, flag, 5)
    library.serve()


def answers_late(library: Library) -> None:
    """Answers after the library has given the request up and said so."""
    library.open()
    request = library.expect("R")
    stop = library.expect("S")
    assert stop[4:12] == request[4:12]
    library.answer(request)
    library.respond(request, EOS, 5)
    library.serve()


def few_quotas(library: Library) -> None:
    request = library.begin()
    library.respond(request, EOS, 5)
    library.answer(library.expect("Q"), values=(1, 2))
    library.serve()


def breaks(message: bytes) -> Callable[[Library], None]:
    """A script that accepts a request, then sends bytes that are no message."""

    def script(library: Library) -> None:
        library.begin()
        library.write(message)
        silent(library)

    return script


SCRIPTS: dict[str, Callable[[Library], None]] = {
    script.__name__: script
    for script in (
        silent,
        stranger,
        leaves,
        garbage,
        answers_before_hello,
        refuses,
        dies_loading,
        serves,
        dies_unanswered,
        responds_and_dies,
        dies_running,
        ends_twice,
        answers_late,
        few_quotas,
    )
}
SCRIPTS |= {
    "unknown_flag": breaks(struct.pack("=Ic", 18, b"e") + struct.pack("=QBII", 1, 9, 0, 0)),
    "unknown_code": breaks(struct.pack("=Ic", 14, b"a") + struct.pack("=IBII", 1, 9, 0, 0)),
    "unknown_letter": breaks(struct.pack("=Ic", 1, b"Z")),
    "short_answer": breaks(struct.pack("=Ic", 3, b"a") + b"xx"),
    "long_text": breaks(struct.pack("=Ic", 10, b"a") + struct.pack("=IBI", 1, 0, 0xFFFFFFFF)),
    "many_tokens": breaks(struct.pack("=Ic", 18, b"e") + struct.pack("=QBII", 1, 0, 0, 0xFFFFFFFF)),
    "empty": breaks(struct.pack("=I", 0)),
    "endless": breaks(struct.pack("=I", (64 << 20) + 1)),
}


if __name__ == "__main__":
    SCRIPTS[sys.argv[1]](Library(int(sys.argv[2])))
