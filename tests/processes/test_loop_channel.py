"""LoopChannel: as Channel, on a loop."""

import asyncio
import socket

import msgspec
import pytest

from kvloom.processes.frames import frame
from kvloom.processes.loop_channel import LoopChannel
from tests.support.waiting import WAIT_S

MESSAGES = [[], [1, 2, 3], [2**31] * 40]
WIRE = b"".join(frame(msgspec.msgpack.encode(message)) for message in MESSAGES)


@pytest.mark.parametrize("cut", range(0, len(WIRE), 7))
def test_any_cut_of_the_stream_gives_the_same_messages(cut: int):
    async def body() -> list[list[int]]:
        ours, theirs = socket.socketpair()
        channel = await LoopChannel.over(ours, list[int])
        with theirs:
            theirs.sendall(WIRE[:cut])
            coming = asyncio.ensure_future(channel.receive(WAIT_S))
            await asyncio.sleep(0)
            theirs.sendall(WIRE[cut:])
            found = [await coming, *[await channel.receive() for _ in MESSAGES[1:]]]
        with pytest.raises(EOFError):
            await channel.receive(WAIT_S)
        await channel.closed()
        return found

    assert asyncio.run(body()) == MESSAGES


def test_all_that_was_sent_arrives_before_the_end_and_nobody_waits_to_send_it():
    async def body() -> None:
        ours, theirs = socket.socketpair()
        channel, other = await LoopChannel.over(ours, list[int]), await LoopChannel.over(theirs, bytes)
        data = bytes(1 << 20)
        channel.send(data)
        channel.close()
        channel.send(b"too late")
        assert await other.receive(WAIT_S) == data
        with pytest.raises(EOFError):
            await other.receive(WAIT_S)
        await other.closed()
        await channel.closed()

    asyncio.run(body())


def test_silence_is_told():
    async def body() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            channel = await LoopChannel.over(ours, list[int])
            theirs.sendall(WIRE[:3])
            with pytest.raises(TimeoutError):
                await channel.receive(0.01)
            await channel.closed()

    asyncio.run(body())
