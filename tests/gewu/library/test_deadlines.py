"""Every call returns when the service is stopped or answers incompletely; the effects of late answers are undone."""

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvloom.gewu.codes import Code
from kvloom.gewu.protocol.frames import PROTOCOL, Frame, encode
from tests.support.gewu.daemons import Client
from tests.support.gewu.service import Peer, Service, library_of_any_patience
from tests.support.waiting import WAIT_S, until

CHAT = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True})
INVALID = 2**32 - 1
SHORT_MS, LONG_MS = 200, 60_000


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return library_of_any_patience(tmp_path_factory.mktemp("patience"))


@pytest.fixture
def start(tmp_path: Path, library: Path) -> Iterator[Callable[[Callable[[Peer], None]], tuple[Service, Client]]]:
    """Starts a scripted service and an app connected to it, whose calls wait long until a test shortens that."""
    services: list[Service] = []
    clients: list[Client] = []

    def start(script: Callable[[Peer], None]) -> tuple[Service, Client]:
        services.append(Service(tmp_path / f"{len(services)}.sock", script, QOS_LIBRARY=str(library)))
        clients.append(Client(services[-1]))
        return services[-1], clients[-1]

    yield start
    for client in clients:
        client.close()
    for service in services:
        service.close()


def create(client: Client, model: Path) -> list[int]:
    return client.call("create", json.dumps({"model": str(model)}))


def silent(peer: Peer) -> None:
    peer.rest()


def half_hello(peer: Peer) -> None:
    peer.sock.sendall(encode(Frame("H", PROTOCOL))[:5])
    peer.rest()


def no_answer(peer: Peer) -> None:
    peer.greet()
    peer.rest()


def half_answer(peer: Peer) -> None:
    peer.greet()
    frame = peer.expect("C")
    peer.sock.sendall(encode(Frame("r", frame.a, Code.OK, frame.b, payload=b"well"))[:-2])
    peer.rest()


@pytest.mark.parametrize("script", [silent, half_hello, no_answer, half_answer])
def test_create_ends_with_nosys(start, model, script):
    service, client = start(script)
    client.call("patience", SHORT_MS)
    for _ in range(2):
        assert create(client, model) == [Code.NOSYS, INVALID]
    client.close()
    service.join()


def test_create_ends_while_nobody_accepts(tmp_path, library, model):
    path = tmp_path / "gewu.sock"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(path))
        listener.listen(0)
        first.connect(str(path))  # fills the queue of the listener
        app = SimpleNamespace(environ={**os.environ, "GEWU_SOCKET": str(path), "QOS_LIBRARY": str(library)})
        client = Client(app)
        client.call("patience", SHORT_MS)
        assert create(client, model) == [Code.NOSYS, INVALID]
        client.close()


def deaf(peer: Peer) -> None:
    peer.create()
    peer.done.wait(WAIT_S)


def mute(peer: Peer) -> None:
    peer.create()
    peer.rest()


def stuck_in_a_frame(peer: Peer) -> None:
    peer.create()
    frame = peer.expect("S")
    peer.sock.sendall(encode(Frame("r", frame.a, Code.OK, frame.b, frame.c, payload=b"well"))[:-2])
    peer.rest()


@pytest.mark.parametrize("script", [deaf, mute, stuck_in_a_frame])
@pytest.mark.parametrize("num_bytes", [10, 8 << 20])
def test_submit_ends_with_nosys_and_destroy_and_abort_as_ever(start, model, script, num_bytes):
    _, client = start(script)
    error, session = create(client, model)
    assert error == Code.OK
    client.call("patience", SHORT_MS)
    long = json.dumps({"messages": [{"role": "user", "content": "a" * num_bytes}]})
    for context in (1, 2):
        assert client.call("submit", session, long, context) == [Code.NOSYS, INVALID]
    assert client.call("abort", session, 1) == Code.NOENT
    assert client.call("destroy", session) == Code.OK
    assert client.call("destroy", session) == Code.NOENT
    assert create(client, model) == [Code.NOSYS, INVALID]
    assert client.call("num_replies", 1) == 0


def test_a_thousand_sessions_of_a_stopped_service_end_at_once(start, model):
    """If each Destroy waited for the one before, the test would take three minutes."""

    def script(peer: Peer) -> None:
        peer.greet()
        for _ in range(1000):
            frame = peer.expect("C")
            peer.send("r", frame.a, Code.OK, frame.b)
        peer.done.wait(WAIT_S)

    _, client = start(script)
    sessions = [create(client, model)[1] for _ in range(1000)]
    client.call("patience", SHORT_MS)
    assert [client.call("destroy", session) for session in sessions] == [Code.OK] * 1000


def test_what_comes_too_late_is_undone(start, model):
    """The session of a late Create is destroyed; the request of a late Submit is aborted, its replies are dropped."""
    late = threading.Event()
    undone: list[Frame | None] = []

    def script(peer: Peer) -> None:
        created = peer.create()
        submitted, lost = peer.expect("S"), peer.expect("C")
        late.wait(WAIT_S)
        peer.send("r", submitted.a, Code.OK, created.b, submitted.c)
        undone.append(peer.receive())
        reply = b'{"message":{"role":"assistant","content":"no"},"finish_reason":"stop"}'
        peer.send("e", created.b, submitted.c, 1, payload=reply)
        peer.send("r", lost.a, Code.OK, lost.b)
        undone.append(peer.receive())
        again = peer.expect("S")
        peer.send("r", again.a, Code.OK, created.b, again.c)
        peer.send("e", created.b, again.c, 1, payload=reply.replace(b"no", b"yes"))
        expected = [Frame("A", 0, created.b, submitted.c), Frame("D", 0, lost.b)]
        assert undone == expected

    service, client = start(script)
    _, session = create(client, model)
    client.call("patience", SHORT_MS)
    assert client.call("submit", session, CHAT, 1)[0] == Code.NOSYS
    assert create(client, model)[0] == Code.NOSYS
    late.set()
    until(lambda: len(undone) == 2)
    client.call("patience", LONG_MS)
    assert client.call("submit", session, CHAT, 2)[0] == Code.OK
    assert [reply["message"]["content"] for reply in client.wait(2)] == ["yes"]
    assert client.call("num_replies", 1) == 0
    service.join()


def test_what_was_never_sent_is_taken_back(start, model):
    """A service that reads again receives the frame that was partly sent, but not the later ones that were given up."""
    late = threading.Event()

    def script(peer: Peer) -> None:
        created = peer.create()
        late.wait(WAIT_S)
        assert len(peer.expect("S").payload) > 8 << 20
        destroyed = peer.expect("D")
        assert destroyed.b == created.b

    service, client = start(script)
    _, session = create(client, model)
    client.call("patience", SHORT_MS)
    long = json.dumps({"messages": [{"role": "user", "content": "a" * (8 << 20)}]})
    assert client.call("submit", session, long, 1)[0] == Code.NOSYS
    assert client.call("submit", session, CHAT, 2)[0] == Code.NOSYS
    assert create(client, model)[0] == Code.NOSYS
    assert client.call("destroy", session) == Code.OK
    late.set()
    service.join()


REPLY = b'{"message":{"role":"assistant","content":"yes"},"finish_reason":"stop"}'


def accepted(peer: Peer, session: int) -> int:
    """Accept the next Submit of this session; return the number of its request."""
    frame = peer.expect("S")
    peer.send("r", frame.a, Code.OK, session, frame.c)
    return frame.c


def test_nothing_comes_after_the_last_reply(start, model):
    """Also when the service sends more replies before the app has read the earlier ones."""

    def script(peer: Peer) -> None:
        session = peer.create().b
        request = accepted(peer, session)
        replies = [Frame("e", session, request, int(number >= 200), payload=REPLY) for number in range(203)]
        peer.sock.sendall(b"".join(map(encode, replies)))
        peer.send("e", session, accepted(peer, session), 1, payload=REPLY)
        peer.rest()

    service, client = start(script)
    _, session = create(client, model)
    for context in (1, 2):
        assert client.call("submit", session, CHAT, context)[0] == Code.OK
        client.wait(context)
    assert client.call("num_replies", 1) == 201
    client.close()
    service.join()


def test_a_number_that_is_too_large_is_not_taken_for_the_rest_of_it(start, model):
    def script(peer: Peer) -> None:
        session = peer.create().b
        numbers = f"{2**32 + session} {accepted(peer, session)}"
        peer.sock.sendall(f"e {numbers} 1 0 {len(REPLY)}\n".encode() + REPLY)
        peer.rest()

    _, client = start(script)
    _, session = create(client, model)
    assert client.call("submit", session, CHAT, 1)[0] == Code.OK
    (only,) = client.wait(1)
    assert only["error"]["code"] == Code.FAULT


@pytest.mark.timeout(120)
def test_a_stopped_daemon_and_the_library_as_it_is_shipped(start_daemon, start_client, model):
    daemon = start_daemon({"rate": 5})
    client, newcomer = start_client(daemon), start_client(daemon)
    newcomer.call("destroy", newcomer.create(model))
    session, other = client.create(model), client.create(model)
    running = client.submit(session)
    client.call("started", running)
    daemon.freeze()
    newcomer.send("create", json.dumps({"model": str(model)}))
    assert client.call("submit", session, CHAT, 77) == [Code.NOSYS, INVALID]
    assert newcomer.answer() == [Code.NOSYS, INVALID]
    assert client.call("destroy", other) == Code.OK
    daemon.thaw()
    assert client.wait(running)[-1]["finish_reason"] == "stop"
    again = client.create(model)
    until(lambda: {found["session"] for found in daemon.status()["sessions"]} == {session, again})
    until(lambda: not any(found["requests"] for found in daemon.status()["sessions"]))
    assert client.call("num_replies", 77) == 0


def test_a_daemon_that_is_killed_while_it_is_stopped_ends_what_waits(start_daemon, start_client, model):
    daemon = start_daemon({"rate": 5})
    client = start_client(daemon)
    session = client.create(model)
    daemon.freeze()
    client.send("submit", session, CHAT, 1)
    daemon.kill()
    assert client.answer() == [Code.FAULT, INVALID]
    assert client.call("submit", session, CHAT, 2) == [Code.NOENT, INVALID]
    assert client.call("destroy", session) == Code.NOENT
    assert create(client, model) == [Code.NOSYS, INVALID]
    daemon.start()
    assert client.ask(client.create(model))[-1]["finish_reason"] == "stop"
