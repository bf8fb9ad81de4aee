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
from kvloom.engine_api.codes import OK, Code, Operation, Status
from kvloom.engine_api.engine import InferenceEngine
from kvloom.engine_api.requests import InferenceRequest, InferenceResponse
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
from kvloom.processes import inside
from kvloom.streams import open_standard_streams

_SIGN_S = 1.0  # seconds between two signs of life
_LONG_CHARS = 1 << 18  # of a text that takes less than a second
_STDOUT, _STDERR = 1, 2

log = logging.getLogger(__name__)

Result = tuple[Status, Sequence[int]]
_STOP = Operation.STOP


class Host:
    """Handles calls one after the other on the main thread, except that each text is tokenised on a thread of its own;
    responses are sent from the engine's thread.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._write_lock = threading.Lock()
        self._engine = InferenceEngine()
        self._lock = threading.Lock()  # guards the next two
        self._starting: set[int] = set()  # requests whose texts are tokenised
        self._unwanted: set[int] = set()  # of these, those to be stopped
        self._calls: dict[bytes, Callable[[Fields], Result]] = {
            b"I": self._init,
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
                call = fields.number("I")
                if letter == b"R":
                    self._forward(call, fields)
                elif letter in self._calls:
                    self._answer(call, *self._calls[letter](fields))
                else:
                    raise WireError(f"no such message {letter!r}")
        except (EOFError, ConnectionError):
            pass
        finally:
            self._engine.finalize()

    def _init(self, fields: Fields) -> Result:
        path = os.fsdecode(fields.bytes())
        with self._signs_of_life():
            status = self._engine.init(None, path)
        return status, [self._engine.get_max_batch_size()[1]]

    def _forward(self, call: int, fields: Fields) -> None:
        number, is_checked = fields.number("Q"), bool(fields.number("?"))
        try:
            request = unpack_request(number, fields)
        except BadRequest as error:
            self._answer(call, Status(Code.INVALID_ARG, str(error)))
            return
        request.set_send_response_callback(functools.partial(self._respond, number))
        if not request.is_input_text():
            self._answer(call, self._engine.forward(request, is_checked))
            return
        with self._lock:
            self._starting.add(number)
        threading.Thread(target=self._tokenise, args=(call, number, request, is_checked), daemon=True).start()

    def _tokenise(self, call: int, number: int, request: InferenceRequest, is_checked: bool) -> None:
        """Forward of a text, on a thread of its own."""
        is_long = len(request.get_input_text()) > _LONG_CHARS
        try:
            with self._signs_of_life() if is_long else contextlib.nullcontext():
                status = self._engine.forward(request, is_checked)
        except Exception as error:  # whatever it is, as a lack of memory: the program's thread waits for an answer
            log.exception("a text cannot be tokenised")
            status = Status(Code.ERROR, f"{type(error).__name__}: {error}")
        with self._lock:
            self._starting.discard(number)
            is_unwanted = number in self._unwanted
            self._unwanted.discard(number)
        if is_unwanted:
            self._engine.control_request(number, _STOP)
        with contextlib.suppress(ConnectionError):
            self._answer(call, status)

    def _stop(self, fields: Fields) -> Result:
        number = fields.number("Q")
        with self._lock:
            if number in self._starting:  # it is stopped when it has begun
                self._unwanted.add(number)
                return OK, ()
        return self._engine.control_request(number, _STOP), ()

    def _quotas(self, fields: Fields) -> Result:
        return self._engine.get_request_block_quotas()

    def _finalize(self, fields: Fields) -> Result:
        return self._engine.finalize(), ()

    def _answer(self, call: int, status: Status, values: Sequence[int] = ()) -> None:
        if call:
            self._send(pack_answer(call, status.status_code(), status.status_msg(), values))

    def _respond(self, number: int, response: InferenceResponse) -> None:
        """Send a response, on the engine's thread. Does nothing when the library is gone."""
        with contextlib.suppress(ConnectionError):
            self._send(pack_response(number, response))

    @contextlib.contextmanager
    def _signs_of_life(self) -> Iterator[None]:
        """A context that sends signs of life while something takes its time, and ends this process if the library is
        gone.
        """
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
    inside.begin()
    open_standard_streams()  # otherwise the socket would get the number of one that the program has closed
    logging.basicConfig(level=logging.WARNING, format="kvloom engine: %(levelname)s %(message)s")
    host = Host(_take_over(fd))
    try:
        host.serve()
    except WireError as error:
        sys.exit(f"kvloom engine: {error}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
