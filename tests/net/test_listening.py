"""An address has one listener: others that start at the same moment get the error that it is taken."""

import multiprocessing
import os
import signal
import socket
from collections import Counter
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from kvloom.net.listening import ListenError, UnixListener, is_serving, listen
from tests.support.ports import free_port

NUM_RIVALS = 4
ROUNDS = 50


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def rival(target: Any, barrier: Barrier, results: Any) -> None:
    """Try to listen once a round, at the same moment as the others; a listener stays open until all have tried."""
    for number in range(ROUNDS):
        barrier.wait()
        held = None
        try:
            held = UnixListener(target, 0o600) if isinstance(target, Path) else listen("127.0.0.1", target)
            results.put((number, "listens"))
        except ListenError as error:
            results.put((number, str(error)))
        barrier.wait()
        if held is not None:
            held.close()


def race(target: Any) -> dict[int, Counter[str]]:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(NUM_RIVALS), context.SimpleQueue()
    rivals = [context.Process(target=rival, args=(target, barrier, results)) for _ in range(NUM_RIVALS)]
    for process in rivals:
        process.start()
    found: dict[int, Counter[str]] = {number: Counter() for number in range(ROUNDS)}
    for _ in range(ROUNDS * NUM_RIVALS):
        number, result = results.get()
        found[number][result] += 1
    for process in rivals:
        process.join()
    return found


def listen_and_die(path: Path) -> None:
    UnixListener(path, 0o600)
    os.kill(os.getpid(), signal.SIGKILL)


def test_of_many_at_the_same_moment_one_listens():
    port = free_port()
    text = f"port {port} of 127.0.0.1 is in use by another program; stop that one or choose another port"
    for results in race(port).values():
        assert results == {"listens": 1, text: NUM_RIVALS - 1}


def test_of_many_at_the_same_moment_one_has_a_unix_socket(tmp_path):
    path = tmp_path / "a.sock"
    for results in race(path).values():
        assert results == {"listens": 1, f"{path} is in use by another program": NUM_RIVALS - 1}
    assert not path.exists()


ANY = [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "0.0.0.0"), ("0.0.0.0", "127.0.0.1"), ("localhost", "127.0.0.1")]
IPV6 = [("::1", "::1"), ("::", "::1"), ("::1", "::"), ("::", "127.0.0.1"), ("127.0.0.1", "::")]


@pytest.mark.parametrize(("first", "second"), [*ANY, *IPV6])
def test_addresses_that_overlap_are_not_shared(first, second):
    if ":" in first + second and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    with listen(first, 0) as one:
        port = one.getsockname()[1]
        with pytest.raises(ListenError, match=f"port {port} of {second} is in use by another program"):
            listen(second, port)


def test_addresses_that_do_not_overlap_are():
    with listen("127.0.0.1", 0) as one, listen("127.0.0.2", one.getsockname()[1]) as other:
        assert one.getsockname()[1] == other.getsockname()[1]


def test_port_0_is_a_free_port_each_time():
    with listen("127.0.0.1", 0) as one, listen("127.0.0.1", 0) as other:
        assert one.getsockname() != other.getsockname()


def test_a_port_whose_connections_just_ended_is_free():
    with listen("127.0.0.1", 0) as one:
        address = one.getsockname()
        client = socket.create_connection(address)
        accepted, _ = one.accept()
        accepted.close()  # this side closes first, so its port is in TIME_WAIT
        client.close()
    listen(*address).close()


@pytest.mark.parametrize(
    ("host", "words"),
    [("203.0.113.7", "203.0.113.7 is not an address of this machine"), ("no such name", "neither an address nor")],
)
def test_what_is_wrong_with_an_address_is_said(host, words):
    with pytest.raises(ListenError, match=words):
        listen(host, 0)


def test_a_unix_socket_that_a_killed_program_left_is_replaced(tmp_path):
    path = tmp_path / "a.sock"
    child = multiprocessing.get_context("spawn").Process(target=listen_and_die, args=(path,))
    child.start()
    child.join()
    assert path.is_socket()
    listener = UnixListener(path, 0o660)
    assert path.stat().st_mode & 0o777 == 0o660
    listener.close()


def test_a_unix_socket_of_somebody_who_takes_no_lock_is_left_alone(tmp_path):
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(ListenError, match="in use by another program"):
            UnixListener(path, 0o600)
        assert path.is_socket()


def test_a_file_is_not_replaced_by_a_socket(tmp_path):
    path = tmp_path / "precious"
    path.write_text("work of a year")
    with pytest.raises(ListenError, match="is there and is not a socket"):
        UnixListener(path, 0o600)
    assert path.read_text() == "work of a year"


def test_closing_leaves_a_socket_that_another_put_there(tmp_path):
    path = tmp_path / "a.sock"
    listener = UnixListener(path, 0o600)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        listener.close()
        assert path.is_socket()


@pytest.mark.parametrize("removed", ["socket", "lock too", "folder"])
def test_a_path_that_was_removed_is_had_again(tmp_path, removed):
    path = tmp_path / "folder" / "x.sock"
    listener = UnixListener(path, 0o600)
    before = listener.socket
    assert listener.renewed() is None
    assert is_serving(path)
    path.unlink()
    if removed != "socket":
        path.with_name("x.sock.lock").unlink()
    if removed == "folder":
        path.parent.rmdir()
    fresh = listener.renewed()
    assert fresh is listener.socket is not before
    before.close()
    assert is_serving(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ListenError, match="in use by another program"):
        UnixListener(path, 0o600)
    listener.close()
    assert not path.exists()


def test_a_path_that_another_program_took_meanwhile_is_left_to_it(tmp_path, caplog):
    path = tmp_path / "x.sock"
    listener = UnixListener(path, 0o600)
    path.unlink()
    path.with_name("x.sock.lock").unlink()
    other = UnixListener(path, 0o600)
    assert listener.renewed() is None
    path.unlink()
    assert listener.renewed() is None, "its lock is another's"
    assert listener.renewed() is None
    assert len(caplog.records) == 1
    listener.close()
    other.close()


def test_a_path_that_cannot_be_had_is_said(tmp_path):
    with pytest.raises(ListenError, match="cannot be listened on"):
        UnixListener(tmp_path / ("x" * 120), 0o600)
    with pytest.raises(ListenError, match="cannot be listened on: Not a directory"):
        UnixListener(Path("/etc/hostname/a.sock"), 0o600)
