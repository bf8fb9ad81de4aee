"""The host of the C++ Engine API: a call that takes long keeps no other call waiting. The test is the library."""

import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloom.engine_api import host as hosts
from kvloom.engine_api.codes import Code, InferResponseEndFlag
from kvloom.engine_api.host import Host
from kvloom.engine_api.wire import PROTOCOL
from tests.support.engine.cpp import LONG, write_config
from tests.support.waiting import WAIT_S

_GREEDY = struct.pack("=fIff?If?ff", 1.0, 0, 1.0, 1.0, False, 0, 1.0, False, 0.0, 0.0)


class Library:
    """Sends calls, and reads what the host sends."""

    def __init__(self, folder: Path) -> None:
        self._sock, self._theirs = socket.socketpair()
        self._sock.settimeout(WAIT_S)
        self.host = Host(self._theirs)
        self._thread = threading.Thread(target=self.host.serve)
        self._thread.start()
        self.send(b"H", struct.pack("=I", PROTOCOL))
        assert self.read()[:1] == b"H"
        path = str(write_config(folder, maxIterTimes=LONG - 1000)).encode()
        self.send(b"I", struct.pack("=II", 1, len(path)) + path)
        assert self.answer() == (1, Code.OK)

    def send(self, letter: bytes, fields: bytes) -> None:
        self._sock.sendall(struct.pack("=I", 1 + len(fields)) + letter + fields)

    def forward(self, call: int, number: int, text: bytes) -> None:
        head = struct.pack("=IQ?I?", call, number, False, 0, False) + _GREEDY
        self.send(b"R", head + struct.pack("=?I", True, len(text)) + text + struct.pack("=I", 0))

    def read(self) -> bytes:
        """The next message, without its length."""
        with self._sock.makefile("rb", buffering=0) as file:
            (length,) = struct.unpack("=I", file.read(4))
            found = b""
            while len(found) < length:
                found += file.read(length - len(found))
        return found

    def answer(self) -> tuple[int, Code]:
        """The next answer's call and code."""
        while (message := self.read())[:1] != b"a":
            assert message[:1] in b"el"
        call, code = struct.unpack_from("=IB", message, 1)
        return call, Code(code)

    def flags(self, number: int) -> Iterator[InferResponseEndFlag]:
        """Of the responses of a request, the last of which ends it."""
        flag = InferResponseEndFlag.INFER_RESPONSE_CONTINUE
        while flag is InferResponseEndFlag.INFER_RESPONSE_CONTINUE:
            message = self.read()
            if message[:1] == b"e" and struct.unpack_from("=Q", message, 1) == (number,):
                flag = InferResponseEndFlag(message[9])
                yield flag

    def close(self) -> None:
        self._sock.close()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self._theirs.close()


class Slow:
    """A tokenizer that waits before it answers for long texts."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def encode(self, text: str, max_tokens: int) -> list[int]:
        if len(text) > 1:
            assert self.go_on.wait(WAIT_S)
        return [1, 2, 3]

    def least_tokens(self, text: str) -> int:
        return 0


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    monkeypatch.setattr(hosts, "_SIGN_S", 0.01)
    library = Library(tmp_path)
    yield library
    library.close()


def test_a_long_text_that_is_tokenised_keeps_no_call_waiting(library: Library, monkeypatch):
    slow = Slow()
    monkeypatch.setattr(library.host._engine, "_tokenizer", slow)
    library.forward(2, 20, b"x" * (hosts._LONG_CHARS + 1))
    assert library.read() == b"l", "a sign of life: the library does not give the call up"
    library.send(b"Q", struct.pack("=I", 3))
    assert library.answer() == (3, Code.OK)
    library.forward(4, 40, b"x")
    assert library.answer() == (4, Code.OK)
    slow.go_on.set()
    assert library.answer() == (2, Code.OK)


def test_a_request_may_be_stopped_while_its_text_is_tokenised(library: Library, monkeypatch):
    slow = Slow()
    monkeypatch.setattr(library.host._engine, "_tokenizer", slow)
    library.forward(2, 20, b"xx")
    library.send(b"S", struct.pack("=IQ", 3, 20))
    assert library.answer() == (3, Code.OK)
    slow.go_on.set()
    assert list(library.flags(20))[-1] is InferResponseEndFlag.INFER_RESPONSE_CANCEL


def test_a_text_that_cannot_be_tokenised_for_whatever_reason_is_answered(library: Library, monkeypatch):
    class Broken:
        def encode(self, text: str, max_tokens: int) -> list[int]:
            raise MemoryError

    monkeypatch.setattr(library.host._engine, "_tokenizer", Broken())
    library.forward(2, 20, b"x")
    assert library.answer() == (2, Code.ERROR)
    library.send(b"Q", struct.pack("=I", 3))
    assert library.answer() == (3, Code.OK)


def test_an_engine_ends_while_a_text_is_tokenised(library: Library, monkeypatch):
    slow = Slow()
    monkeypatch.setattr(library.host._engine, "_tokenizer", slow)
    library.forward(2, 20, b"xx")
    library.send(b"F", struct.pack("=I", 3))
    assert library.answer() == (3, Code.OK)
    slow.go_on.set()
    assert library.answer() == (2, Code.ERROR)
