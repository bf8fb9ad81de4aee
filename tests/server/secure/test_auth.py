"""API keys, the rule about listening on 0.0.0.0, and clients that are slow on purpose."""

import asyncio
import contextlib
import http.client
import socket
import threading

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from kvloom.server.http.slow import GuardedProtocol
from kvloom.server.secure.api_keys import AccessError, KeyRing, check_bind, hash_key, new_key, read_hashes
from kvloom.server.secure.key_guard import ApiKeyMiddleware
from tests.support.waiting import until
from tests.support.wire.triton import serving

KEYS = [new_key(), new_key()]
LATE = threading.Event()


async def read(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


def app():
    return Starlette(
        routes=[Route(path, read, methods=["GET", "POST"]) for path in ("/health", "/v1/models", "/infer")]
    )


@pytest.fixture(scope="module")
def url():
    guarded = ApiKeyMiddleware(app(), KeyRing([hash_key(key) for key in KEYS]), open_paths=["/health"])
    with serving(guarded) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("key", KEYS, ids=["first", "second"])
@pytest.mark.parametrize("form", ["bearer", "x-api-key"])
def test_every_key_opens_in_both_forms(url, key, form):
    headers = {"Authorization": f"Bearer {key}"} if form == "bearer" else {"X-Api-Key": key}
    assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer x"}, {"Authorization": f"Basic {KEYS[0]}"}, {"X-Api-Key": KEYS[0] + "x"}]
)
def test_without_a_key_the_answer_is_401_in_the_form_of_the_dialect(url, headers):
    answer = httpx.get(f"{url}/v1/models", headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert httpx.post(f"{url}/infer", headers=headers).json()["error_type"] == "authentication"


def test_open_paths_need_no_key_and_are_exact(url):
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/health/").status_code == 401


def test_who_holds_a_key_has_a_name_of_their_own_that_stays():
    hashes = [hash_key(key) for key in KEYS]
    names = [KeyRing(hashes).tenant_of(key) for key in KEYS]
    assert None not in names
    assert len(set(names)) == 2
    assert [KeyRing(hashes[::-1]).tenant_of(key) for key in KEYS] == names
    assert KeyRing(hashes).tenant_of(new_key()) is None


def test_a_stored_hash_is_salted_and_does_not_hold_the_key():
    assert hash_key(KEYS[0]) != hash_key(KEYS[0])
    assert KEYS[0] not in hash_key(KEYS[0])


@pytest.mark.parametrize("key", ["short", "x" * 513, "密" * 30, "with space" * 3])
def test_keys_that_can_be_guessed_or_sent_wrongly_are_refused(key):
    with pytest.raises(AccessError, match="API key must be"):
        hash_key(key)


@pytest.mark.parametrize("hashes", [[], ["plain-key"], ["sha256$zz$00"], ["md5$00$00"]])
def test_a_ring_of_wrong_hashes_is_refused(hashes):
    with pytest.raises(AccessError):
        KeyRing(hashes)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "cannot be read: No such file or directory"),
        ("# none\n\n", "holds no hash of an API key; make one with: kvloom api-key"),
        (
            f"# one\n{hash_key(KEYS[0])}\n\n{KEYS[1]}\n",
            "is not a hash, as `kvloom api-key` prints it on its second line",
        ),
    ],
)
def test_a_file_of_hashes_is_told_by_its_option_and_line(tmp_path, text, problem):
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    where = f"{file}, line 4" if text and KEYS[1] in text else str(file)
    with pytest.raises(AccessError) as caught:
        read_hashes(file, "--api-key-file")
    assert str(caught.value) == f"--api-key-file: {where} {problem}"


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "0:0:0:0:0:0:0:0"])
def test_all_addresses_must_be_allowed_by_name(address):
    with pytest.raises(AccessError, match="allowAllZeroIpListening"):
        check_bind(address, False)
    check_bind(address, True)
    check_bind("127.0.0.1", False)


class Impatient(GuardedProtocol):
    head_timeout_s = 0.2
    num_looks = 0  # which sends the head too late

    def _be_late(self) -> None:
        Impatient.num_looks += 1
        super()._be_late()


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nX-A: 1"])
def test_a_head_that_is_slow_ends_its_connection(sent, caplog, monkeypatch):
    with serving(app(), http=Impatient) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=120) as sock:
            sock.sendall(sent)
            with contextlib.suppress(ConnectionError):
                assert sock.recv(1) == b""
        monkeypatch.setattr(Impatient, "head_timeout_s", 120)  # on a busy machine 0.2 s are too few for others
        assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=120).status_code == 200
    assert ends(caplog) == ["connection closed: the head of its request is too slow"]


def ends(caplog) -> list[str]:
    """The reasons why connections were closed."""
    return [record.getMessage() for record in caplog.records if record.name == GuardedProtocol.__module__]


def head_of(num_bytes: int) -> bytes:
    """The whole head of a request."""
    begin, end = b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: ", b"\r\n\r\n"
    return begin + b"a" * (num_bytes - len(begin) - len(end)) + end


def answer_of(sock: socket.socket) -> tuple[int, bytes]:
    """Status and body of the next answer."""
    with http.client.HTTPResponse(sock) as answer:
        answer.begin()
        return answer.status, answer.read()


@pytest.mark.parametrize("num_before", [0, 1, 2], ids=["second", "third", "fourth"])
def test_a_head_of_64_kib_is_answered_and_a_longer_one_is_not_waited_for(num_before, caplog):
    """The limit counts each head of a connection separately; a longer one is refused at byte 65,537, not at its end."""
    with serving(app()) as port, socket.create_connection(("127.0.0.1", port), timeout=120) as sock:
        for _ in range(num_before + 1):
            sock.sendall(head_of(64 * 1024))
            assert answer_of(sock) == (200, b"0")
        assert ends(caplog) == []
        sock.sendall(head_of(128 * 1024)[: 64 * 1024 + 1])
        with contextlib.suppress(ConnectionError):
            assert sock.recv(1) == b""
    assert ends(caplog) == ["connection closed: the head of its request is too long"]


class Heard(GuardedProtocol):
    """The bytes that all connections have received."""

    num_bytes = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        Heard.num_bytes += len(data)


def test_heads_that_come_in_pieces_are_counted_one_by_one(caplog, monkeypatch):
    monkeypatch.setattr(Heard, "num_bytes", 0)
    with serving(app(), http=Heard) as port, socket.create_connection(("127.0.0.1", port), timeout=120) as sock:
        for number in range(3):
            head = head_of(40 * 1024)
            sock.sendall(head[:-1])
            until(lambda number=number, head=head: Heard.num_bytes == (number + 1) * len(head) - 1)
            sock.sendall(head[-1:])
            assert answer_of(sock) == (200, b"0")
    assert ends(caplog) == []


def test_the_first_head_of_a_connection_is_not_waited_for_either(caplog):
    with serving(app()) as port, socket.create_connection(("127.0.0.1", port), timeout=120) as sock:
        sock.sendall(head_of(128 * 1024)[: 64 * 1024 + 1])
        with contextlib.suppress(ConnectionError):
            assert sock.recv(1) == b""
    assert ends(caplog) == ["connection closed: the head of its request is too long"]


def test_a_head_that_follows_a_long_body_at_once_is_not_taken_for_long(caplog):
    body = b"x" * 100_000
    first = b"POST /infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + body
    with serving(app()) as port, socket.create_connection(("127.0.0.1", port), timeout=120) as sock:
        for end in (1, 30, 199):
            sock.sendall(first + head_of(200)[:end])
            assert answer_of(sock) == (200, b"100000")
            sock.sendall(head_of(200)[end:])
            assert answer_of(sock) == (200, b"0")
    assert ends(caplog) == []


async def late(request: Request) -> PlainTextResponse:
    """An application that answers when `LATE` is set."""
    await asyncio.to_thread(LATE.wait)
    return PlainTextResponse("here")


def test_a_head_that_waits_behind_answers_is_not_slow(caplog):
    """The server reads pipelined requests one at a time, so the wait is not the client's fault."""
    head = b"GET /late HTTP/1.1\r\nHost: x\r\n\r\n"
    LATE.clear()
    Impatient.num_looks = 0
    slow = Starlette(routes=[Route("/late", late)])
    with serving(slow, http=Impatient) as port, socket.create_connection(("127.0.0.1", port), timeout=120) as sock:
        sock.sendall(3 * head + head[:-1])
        until(lambda: Impatient.num_looks > 2 or ends(caplog))
        LATE.set()
        assert ends(caplog) == []
        sock.sendall(head[-1:])
        answers = b""  # which sometimes arrive together
        while answers.count(b"here") < 4 and (more := sock.recv(1 << 16)):
            answers += more
        assert answers.count(b"HTTP/1.1 200 OK") == answers.count(b"here") == 4
    assert ends(caplog) == []
