"""vLLM's process: takes requests and returns tokens until its socket closes.

`python -m kvloom.vllm.main SOCKET LEVEL`: the number of an open socket, and the log level.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import traceback
from typing import Any

import uvloop

from kvloom.contract.errors import ServingError
from kvloom.contract.hosted import HostOrder, HostSetup
from kvloom.contract.lifecycle import Failed, Ready
from kvloom.processes import childlog, inside
from kvloom.processes.loop_channel import LoopChannel
from kvloom.vllm.arguments import arguments_of

# defaults of the environment: nothing is downloaded or reported to others, and vLLM logs at the server's level
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_DO_NOT_TRACK": "1"}
_LEVELS = ((logging.DEBUG, "DEBUG"), (logging.INFO, "INFO"), (logging.WARNING, "WARNING"))


async def serve(sock: socket.socket) -> None:
    """Load the model, and answer until the server closes the socket, which raises EOFError."""
    channel = await LoopChannel.over(sock, HostSetup)
    setup: HostSetup = await channel.receive()
    channel.expect(HostOrder)
    try:
        from kvloom.vllm.desk import open_desk  # noqa: PLC0415 -- vLLM reads the environment, which is set by now

        desk = await open_desk(setup, arguments_of(setup.config), channel.send)
    except ServingError as error:
        channel.send(Failed(str(error)))
        await channel.closed()
        return
    except Exception as error:  # whatever it is, the server is told before this process ends
        traceback.print_exc()
        channel.send(Failed(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"))
        await channel.closed()
        return
    gc.collect()
    gc.freeze()  # the model's objects are permanent: collections skip them
    channel.send(Ready(desk.info))
    receiving = asyncio.ensure_future(_receive_all(channel, desk))
    failed = asyncio.ensure_future(desk.failed)
    await asyncio.wait((receiving, failed), return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        channel.send(Failed(failed.result()))
        await channel.closed()


async def _receive_all(channel: LoopChannel, desk: Any) -> None:
    with contextlib.suppress(EOFError):
        while True:
            desk.take(await channel.receive())


def main() -> None:
    number, level = int(sys.argv[1]), int(sys.argv[2])
    os.dup2(2, 1)  # vLLM writes its log to standard output
    childlog.begin(level)
    named = next((name for at, name in _LEVELS if level <= at), "ERROR")
    for name, value in {**_ENVIRONMENT, "VLLM_LOGGING_LEVEL": named}.items():
        os.environ.setdefault(name, value)
    inside.begin()
    sock = socket.socket(fileno=number)
    sock.set_inheritable(False)
    os.register_at_fork(after_in_child=lambda: os.close(number))  # else the server would not notice this process's end
    try:
        uvloop.run(serve(sock))  # as vLLM's own server does
    except EOFError:
        pass
    finally:
        os.killpg(0, signal.SIGKILL)  # vLLM's child processes end too


if __name__ == "__main__":
    main()
