"""The engine's host: `python -m kvloom.engine_api.host FD` holds one engine for libkvloom_engine.so until FD closes."""

import contextlib
import functools
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version

from kvloom.contract.errors import BadRequest
from kvloom.engine.link.signals import leave_signals_to_the_parent
from kvloom.engine_api.codes import Code, Operation, Status
from kvloom.engine_api.engine import InferenceEngine
from kvloom.engine_api.requests import InferenceResponse
from kvloom.engine_api.wire import (
    LENGTH,
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    SIGN_OF_LIFE,
    Fields,
    WireError,
    pack_answer,
    pack_hello,
    pack_response,
    unpack_request,
)
from kvloom.streams import open_standard_streams

_SIGN_S = 1.0  # seconds between two signs of life
_STDOUT, _STDERR = 1, 2

Result = tuple[Status, Sequence[int]]


class Host:
    """Handles calls one after the other on the main thread; responses are sent from the engine's thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._write_lock = threading.Lock()
        self._engine = InferenceEngine()
        self._calls: dict[bytes, Callable[[Fields], Result]] = {
            b"I": self._init,
            b"R": self._forward,
            b"S": self._stop,
            b"Q": self._quotas,
            b"F": self._finalize,
        }

    def serve(self) -> None:
        """Serve until the library closes the socket. Raises WireError."""
        try:
            letter, fields = self._receive()
            theirs = fields.number("I") if letter == b"H" else 0
            self._send(pack_hello(version("kvloom")))
            if theirs != PROTOCOL:
                raise WireError(f"the library speaks protocol {theirs}, kvloom {version('kvloom')} speaks {PROTOCOL}")
            while True:
                letter, fields = self._receive()
                if letter not in self._calls:
                    raise WireError(f"no such message {letter!r}")
                call = fields.number("I")
                status, values = self._calls[letter](fields)
                if call:
                    self._send(pack_answer(call, status.status_code(), status.status_msg(), values))
        except (EOFError, ConnectionError):
            pass
        finally:
            self._engine.finalize()

    def _init(self, fields: Fields) -> Result:
        path = os.fsdecode(fields.bytes())
        with self._signs_of_life():
            status = self._engine.init(None, path)
        return status, [self._engine.get_max_batch_size()[1]]

    def _forward(self, fields: Fields) -> Result:
        number, is_checked = fields.number("Q"), bool(fields.number("?"))
        try:
            request = unpack_request(number, fields)
        except BadRequest as error:
            return Status(Code.INVALID_ARG, str(error)), ()
        request.set_send_response_callback(functools.partial(self._respond, number))
        return self._engine.forward(request, is_checked), ()

    def _stop(self, fields: Fields) -> Result:
        return self._engine.control_request(fields.number("Q"), Operation.STOP), ()

    def _quotas(self, fields: Fields) -> Result:
        return self._engine.get_request_block_quotas()

    def _finalize(self, fields: Fields) -> Result:
        return self._engine.finalize(), ()

    def _respond(self, number: int, response: InferenceResponse) -> None:
        """Send a response, on the engine's thread. Does nothing when the library is gone."""
        with contextlib.suppress(ConnectionError):
            self._send(pack_response(number, response))

    @contextlib.contextmanager
    def _signs_of_life(self) -> Iterator[None]:
        """A context that sends signs of life while a model is loaded, and ends this process if the library is gone."""
        done = threading.Event()

        def send() -> None:
            while not done.wait(_SIGN_S):
                try:
                    self._send(SIGN_OF_LIFE)
                except ConnectionError:
                    os._exit(1)

        thread = threading.Thread(target=send, name="signs of life", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _send(self, message: bytes) -> None:
        with self._write_lock:
            self._sock.sendall(message)

    def _receive(self) -> tuple[bytes, Fields]:
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        if not 1 <= length <= MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {length} bytes")
        message = self._read(length)
        return message[:1], Fields(message, 1)

    def _read(self, length: int) -> bytes:
        """Read exactly `length` bytes. Raises EOFError."""
        found = bytearray(length)
        view = memoryview(found)
        while view:
            count = self._sock.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]
        return bytes(found)


def _take_over(fd: int) -> socket.socket:
    """The library's socket, made non-inheritable. Closes other descriptors that the app has leaked, and redirects
    standard output to stderr.
    """
    sock = socket.socket(fileno=os.dup(fd))
    for other in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the listing's own descriptor
            if other > _STDERR and os.get_inheritable(other):  # Python's own are not inheritable
                os.close(other)
    with contextlib.suppress(OSError):  # the app has no standard error
        os.dup2(_STDERR, _STDOUT)
    return sock


def main(fd: int) -> None:
    leave_signals_to_the_parent()
    open_standard_streams()  # otherwise the socket would get the number of one that the program has closed
    logging.basicConfig(level=logging.WARNING, format="kvloom engine: %(levelname)s %(message)s")
    host = Host(_take_over(fd))
    try:
        host.serve()
    except WireError as error:
        sys.exit(f"kvloom engine: {error}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
