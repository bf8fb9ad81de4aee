"""A painter that hangs: its order ends with an error, and it is started again. The painter's pipeline is a fake."""

import asyncio
import os
import signal
import sys
from contextlib import aclosing
from dataclasses import replace

import pytest

from kvloom.contract.errors import GenerationFailed, ModelError
from kvloom.images import process
from kvloom.images.messages import Paint, Progress, Setup
from kvloom.images.process import PictureProcess
from kvloom.processes import kinds
from tests.support.waiting import WAIT_S

LIFE = """
import socket, sys, threading, time
from kvloom.processes.channel import Channel
from kvloom.contract.lifecycle import Pong, Ready
from kvloom.images.messages import (Order, PipelineInfo, Progress, Setup)
from kvloom.processes import inside

inside.begin()
channel = Channel(socket.socket(fileno=int(sys.argv[1])), Setup)
setup = channel.receive()
if setup.path == "/hangs":
    time.sleep(1000)
channel.expect(Order)
channel.send(Ready(PipelineInfo("Fake", 8, 8, 8, 1, 77)))
while True:
    if channel.is_readable(0.02):
        channel.send(Progress(channel.receive().id, 0, 1, 1000))
    channel.send(Pong())
"""
KIND = replace(kinds.PAINTER, command=(sys.executable, "-c", LIFE))
ORDER = Paint(0, "x", "", 8, 8, [1], 1000, None)


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "check", lambda path: None)


def test_an_order_of_a_painter_that_is_stopped_ends_with_an_error_and_it_is_started_again():
    painter = PictureProcess("sd", Setup("/nowhere"), KIND)
    painter.kind = replace(KIND, silence_s=2.0)  # enough for its second start too

    async def order_and_stop() -> None:
        painter.begin()
        try:
            await ready(painter)
            with pytest.raises(GenerationFailed, match="the model process gave no sign of life for 2 s"):
                await begun(painter, stops=True)
            await ready(painter)
            await begun(painter, stops=False)
        finally:
            await asyncio.to_thread(painter.close)
            await painter._task

    asyncio.run(asyncio.wait_for(order_and_stop(), WAIT_S))
    assert painter.num_restarts


async def ready(painter: PictureProcess) -> None:
    while not painter.is_ready:
        await asyncio.sleep(0.01)


async def begun(painter: PictureProcess, stops: bool) -> None:
    """An order's first report; stops: the painter is stopped then, and the order waited for."""
    async with aclosing(painter.paint(ORDER)) as reports:
        assert await anext(reports) == Progress(0, 0, 1, 1000)
        if stops:
            os.kill(painter.pid, signal.SIGSTOP)
            await anext(reports)


def test_a_painter_that_hangs_while_it_loads_is_told():
    with pytest.raises(ModelError, match="loading /hangs failed: the model process gave no sign of life"):
        PictureProcess("sd", Setup("/hangs"), replace(KIND, silence_s=0.5))
