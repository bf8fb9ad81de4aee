"""The control plane and bodies that do not arrive."""

import socket

import httpx

from kvloom.pool.control import service
from tests.support.pool.control import TOKEN
from tests.support.waiting import WAIT_S

HEAD = f"PUT /v1/tenants/t HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n"


def address_of(client: httpx.Client) -> tuple[str, int]:
    assert client.base_url.port is not None
    return client.base_url.host, client.base_url.port


def answer_to(client: httpx.Client, sent: str) -> bytes:
    """All that the control plane answers until it closes the connection."""
    with socket.create_connection(address_of(client), timeout=WAIT_S) as stream:
        stream.sendall(sent.encode())
        return b"".join(iter(lambda: stream.recv(65536), b""))


def test_a_body_that_does_not_arrive_is_not_waited_for(served, monkeypatch):
    monkeypatch.setattr(service, "_BODY_S", 0.05)
    answer = answer_to(served, HEAD + "Content-Length: 9\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'{"error_code":"EMS.0408","error_msg":"the body did not arrive in 0.05 s"}' in answer
    assert served.get("/v1/tenants").json() == {"tenants": []}


def test_after_a_body_that_is_too_large_the_connection_ends(served):
    size = service._MAX_BODY_BYTES + 1
    answer = answer_to(served, f"{HEAD}Content-Length: {size + 9}\r\n\r\n{' ' * size}")
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_error_of_ours(served, caplog):
    with socket.create_connection(address_of(served)) as stream:
        stream.sendall((HEAD + "Content-Length: 9\r\n\r\n{").encode())
        assert served.get("/healthz").status_code == 200
    assert served.get("/v1/tenants").json() == {"tenants": []}
    assert "Traceback" not in caplog.text
