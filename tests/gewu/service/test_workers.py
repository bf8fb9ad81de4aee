"""Workers are forked from a template, which lives as long as one of them is wanted."""

import asyncio
import os
import signal

from kvloom.gewu.hosts.worker import WorkerOpener
from kvloom.gewu.modelfiles import ModelFiles
from kvloom.gewu.protocol.messages import Host, Listeners, Open
from tests.support.waiting import WAIT_S

SETUP = Open("", "fake", 1 << 20, 1024)


def test_workers_share_a_template_that_outlives_their_deaths_and_ends_with_the_last():
    async def body() -> None:
        opener, died = WorkerOpener(WAIT_S), asyncio.Queue[str]()

        async def opened() -> Host:
            return await opener(SETUP, ModelFiles("model", {}), Listeners(lambda events: None, died.put_nowait))

        assert not opener.pids
        first, second = await opened(), await opened()
        (template,) = opener.pids
        assert len({template, first.pid, second.pid}) == 3
        for host in (first, second):
            os.kill(host.pid or 0, signal.SIGKILL)
            assert await died.get() == "the model process was killed by signal 9"
        third = await opened()
        assert opener.pids == [template]
        for host in (first, second):
            await host.close()
        await asyncio.gather(*opener._ending)
        assert opener.pids == [template]
        await third.close()
        await asyncio.gather(*opener._ending)
        assert not opener.pids

    asyncio.run(asyncio.wait_for(body(), WAIT_S))
