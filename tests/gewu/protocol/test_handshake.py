"""Both sides name their protocol first; each refuses one that does not match, once, and names both numbers."""

import json
import re
import socket
from pathlib import Path

import pytest

from kvloom.gewu.build import PACKAGE
from kvloom.gewu.codes import Code
from kvloom.gewu.protocol.frames import PROTOCOL, Frame, FrameDecoder, encode
from kvloom.gewu.reason import why_refused
from kvloom.gewu.status import ask_status
from tests.support.gewu.daemons import Client
from tests.support.gewu.service import Peer, Service
from tests.support.waiting import WAIT_S


def say_hello(version: int):
    def script(peer: Peer) -> None:
        assert peer.receive() == Frame("H", PROTOCOL)
        peer.send("H", version)
        assert peer.rest() == []

    return script


def of_protocol_1(peer: Peer) -> None:
    """An older service, which does not know a hello and closes the connection."""
    peer.expect("H")
    peer.sock.shutdown(socket.SHUT_RDWR)


def of_another_kind(peer: Peer) -> None:
    peer.expect("H")
    peer.sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    peer.rest()


def test_both_sides_are_built_with_the_same_number():
    (number,) = re.findall(r"GEWU_PROTOCOL = (\d+)", (PACKAGE / "c" / "internal.h").read_text())
    assert int(number) == PROTOCOL


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (say_hello(PROTOCOL + 1), f"the service speaks protocol {PROTOCOL + 1}, this library {PROTOCOL}"),
        (say_hello(1), f"the service speaks protocol 1, this library {PROTOCOL}"),
        (of_protocol_1, f"it speaks protocol 1, this library {PROTOCOL}"),
        (of_another_kind, ""),
    ],
)
def test_the_library_refuses_a_service_of_another_protocol(script, said, model, tmp_path, capfd):
    service = Service(tmp_path / "gewu.sock", script, GEWU_LOG="1")
    client = Client(service)
    assert client.call("create", json.dumps({"model": str(model)})) == [Code.NOSYS, 2**32 - 1]
    client.close()
    service.join()
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("libqos")]
    assert len(lines) == 1
    assert said in lines[0]
    path = Path(service.environ["GEWU_SOCKET"])
    with pytest.raises(ConnectionError, match="protocol"):
        ask_status(path)
    assert "protocol" in why_refused(Code.NOSYS, str(model), service.environ)
    service.close()


def talk(path: Path, *frames: Frame) -> tuple[list[Frame], bool]:
    """The daemon's answers to these frames, one each, and whether it closed the connection instead."""
    decoder, found = FrameDecoder(), []
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        sock.settimeout(WAIT_S)
        try:
            for frame in frames:
                sock.sendall(encode(frame))
                while (answer := decoder.next_frame()) is None:
                    data = sock.recv(4096)
                    if not data:
                        return found, True
                    decoder.feed(data)
                found.append(answer)
        except (BrokenPipeError, ConnectionResetError):
            return found, True
    return found, False


def test_the_daemon_refuses_a_library_of_another_protocol(start_daemon, capfd):
    daemon = start_daemon({})
    talked = talk(daemon.socket, Frame("H", PROTOCOL + 1), Frame("C", 1, 1, 0, 0, b"{}"))
    assert talked == ([Frame("H", PROTOCOL)], True)
    lines = [line for line in capfd.readouterr().err.splitlines() if "protocol" in line]
    assert len(lines) == 1
    assert f"speaks Gewu's protocol {PROTOCOL + 1}, this service {PROTOCOL}" in lines[0]


def test_the_daemon_refuses_a_library_that_says_no_hello(start_daemon, capfd):
    """A library of protocol 1 says none: each of its calls gets a code that it knows; the log gets one line."""
    daemon = start_daemon({})
    calls = [Frame("C", 1, 1, 0, 0, b"{}"), Frame("S", 2, 1, 1, 0, b"{}"), Frame("D", 3, 1)]
    answers, has_ended = talk(daemon.socket, *calls)
    assert [(answer.op, answer.a, answer.b) for answer in answers] == [("r", n, Code.NOSYS) for n in (1, 2, 3)]
    assert f"speaks Gewu's protocol 1, this service {PROTOCOL}".encode() in answers[0].payload
    assert not has_ended
    lines = [line for line in capfd.readouterr().err.splitlines() if "protocol" in line]
    assert len(lines) == 1
    assert f"protocol 1, this service {PROTOCOL}" in lines[0]


@pytest.mark.parametrize("frame", [Frame("A", 1, 1, 1), Frame("Z", 1), Frame("F", 1)])
def test_the_daemon_ends_a_connection_that_begins_with_anything_else(daemon, frame):
    assert talk(daemon.socket, frame) == ([], True)
