"""Channel: messages arrive whole and in order, however the socket cuts them."""

import fcntl
import socket
import struct
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.net.listening import allow_descriptors
from kvloom.processes.channel import Channel
from tests.support.waiting import WAIT_S


def _wire(messages: list[list[int]]) -> bytes:
    bodies = [msgspec.msgpack.encode(message) for message in messages]
    return b"".join(struct.pack("<I", len(body)) + body for body in bodies)


@given(messages=st.lists(st.lists(st.integers(0, 2**31)), min_size=1, max_size=5), cut=st.data())
def test_any_cut_of_the_stream_gives_the_same_messages(messages: list[list[int]], cut: st.DataObject) -> None:
    wire = _wire(messages)
    at = cut.draw(st.integers(0, len(wire)))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel, got = Channel(ours, list[int]), []
        theirs.sendall(wire[:at])
        while True:
            try:
                got.append(channel.receive(timeout_s=0.0))
            except TimeoutError:
                break
        theirs.sendall(wire[at:])
        got += [channel.receive(timeout_s=WAIT_S) for _ in messages[len(got) :]]
    assert got == messages


def test_several_messages_in_one_read_are_all_announced() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours, list[int])
        theirs.sendall(_wire([[1], [2]]))
        assert channel.receive() == [1]
        assert channel.has_message
        assert channel.receive() == [2]
        assert not channel.has_message


def test_an_end_within_a_message_is_an_end() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        channel = Channel(ours, list[int])
        theirs.sendall(_wire([[1, 2, 3]])[:-1])
        theirs.close()
        with pytest.raises(EOFError):
            channel.receive(timeout_s=WAIT_S)


MUCH = list(range(400_000))  # more than a socket buffers


def test_two_ends_that_send_much_at_once_do_not_wait_for_each_other_to_read() -> None:
    ours, theirs = socket.socketpair()
    got: list[bool] = []

    def talk(end: Channel) -> None:
        end.send(MUCH)
        got.append(end.receive() == MUCH)

    with ours, theirs:
        ends = [Channel(ours, list[int]), Channel(theirs, list[int])]
        threads = [threading.Thread(target=talk, args=(end,), daemon=True) for end in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert got == [True, True]


def test_an_end_that_does_not_read_is_not_waited_for_for_ever() -> None:
    ours, theirs = socket.socketpair()
    ended = threading.Timer(WAIT_S, theirs.shutdown, [socket.SHUT_RDWR])  # ends the test if `send` waits for ever
    ended.start()
    with ours, theirs, pytest.raises(TimeoutError, match=r"nothing was read for 0\.01 s"):
        Channel(ours, list[int]).send(MUCH, 0.01)
    ended.cancel()


@pytest.mark.parametrize("num_read", [0, 1])
def test_an_end_that_goes_while_it_is_sent_to_is_an_error(num_read: int) -> None:
    ours, theirs = socket.socketpair()

    def leave() -> None:
        with theirs:
            theirs.recv(num_read)

    with ours:
        thread = threading.Thread(target=leave)
        thread.start()
        with pytest.raises(OSError, match=r"."):
            Channel(ours, list[int]).send(MUCH)
        thread.join()


def test_descriptors_have_any_number() -> None:
    allow_descriptors()
    ours, theirs = socket.socketpair()
    with theirs, socket.socket(fileno=fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, 1024)) as high:
        ours.close()
        channel = Channel(high, list[int])
        assert not channel.is_readable()
        with pytest.raises(TimeoutError, match="no message within"):
            channel.receive(0.01)
        with pytest.raises(TimeoutError, match="nothing was read for"):
            channel.send(MUCH, 0.01)
        theirs.sendall(_wire([[7]]))
        assert channel.receive(10**9) == [7]
