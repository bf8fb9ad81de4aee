"""The server's own cost of a streamed token: the mock model over HTTP, compared with an app that only sends events.

`python -m benches.server.http_cost` serves the mock model, and a bare ASGI app on the same uvicorn whose streams are as
many events of the same bytes, made in advance, and measures them in turns: 32 streams (`--streams`) of 256 events each,
four times a round. One JSON line a round, then the medians; a client in this process reads and counts:

  server_us, bare_us   processor time an event of each server, in microseconds
  rank_us, client_us   the same of the mock's rank, and of this process
  ratio                server_us to bare_us of the same round
  tok_s, bare_tok_s    events a second, all of them on the same cores
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvicorn

from kvloom.bench.client import Target
from kvloom.bench.process import ServerProcess, free_port, listener_pid

EVENTS, REPEATS, WARM = 256, 4, 2
PROMPT = [5] * 16
EVENT = b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef-0","object":"text_completion","created":1700000000,"model":"m","system_fingerprint":"fp_kvloom","choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'  # noqa: E501
TICKS_S = os.sysconf("SC_CLK_TCK")


class Bare:
    """The bare app. A thread wakes the loop for every step, as an engine does; a step is one event for each stream."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []
        self._is_wanted = threading.Event()
        self._thread: threading.Thread | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        loop = asyncio.get_running_loop()
        if self._thread is None:
            self._thread = threading.Thread(target=self._make_steps, args=(loop,), daemon=True)
            self._thread.start()
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for _ in range(EVENTS):
            step = loop.create_future()
            self._waiting.append(step)
            self._is_wanted.set()
            await step
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    def _make_steps(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._is_wanted.wait():
            self._is_wanted.clear()
            loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for step in waiting:
            step.set_result(None)


async def one_stream(port: int) -> int:
    """Request one streamed answer; the number of its events."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": EVENTS, "stream": True, "ignore_eos": True, "temperature": 0}
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(data), data)
    )
    count, tail = 0, b""
    while chunk := await reader.read(1 << 16):
        count += (tail + chunk).count(b"data: {")
        tail = chunk[-6:]  # may hold the beginning of the next event
    writer.close()
    return count


async def all_streams(port: int, streams: int, repeats: int) -> int:
    async def some() -> int:
        return sum([await one_stream(port) for _ in range(repeats)])

    return sum(await asyncio.gather(*(some() for _ in range(streams))))


def processor_s(pid: int) -> float:
    """Processor time of a process so far, user and system, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_S


def children(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split()
    return [int(child) for child in found]


def measured(port: int, streams: int) -> dict[str, float]:
    """Microseconds an event of the server, its children and this process; and events a second."""
    pid = listener_pid(port)
    assert pid is not None, "the server listens"
    groups: Sequence[list[int]] = ([pid], children(pid), [os.getpid()])
    before = [sum(map(processor_s, group)) for group in groups]
    began_s = time.perf_counter()
    count = asyncio.run(all_streams(port, streams, REPEATS))
    wall_s = time.perf_counter() - began_s
    assert count >= streams * REPEATS * EVENTS * 0.95, f"{count} events are too few"
    spent = [sum(map(processor_s, group)) - start for group, start in zip(groups, before, strict=True)]
    server_us, rank_us, client_us = (round(1e6 * value / count, 2) for value in spent)
    return {"server_us": server_us, "rank_us": rank_us, "client_us": client_us, "tok_s": round(count / wall_s)}


def one_round(ports: dict[str, int], streams: int, is_turned: bool) -> dict[str, float]:
    found = {name: measured(ports[name], streams) for name in list(ports)[:: -1 if is_turned else 1]}
    own, plain = found["kvloom"], found["bare"]
    ratio = round(own["server_us"] / plain["server_us"], 2)
    return {**own, "bare_us": plain["server_us"], "bare_tok_s": plain["tok_s"], "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bare", type=int, metavar="PORT", help="only serve the bare app there")
    options = parser.parse_args()
    if options.bare:
        uvicorn.run(Bare(), host="127.0.0.1", port=options.bare, log_config=None, access_log=False)
        return
    ports = {"kvloom": free_port(), "bare": free_port()}
    serve = [sys.executable, "-m", "kvloom.cli", "serve", "--backend", "fake", "--served-model-name", "m"]
    commands = {"kvloom": [*serve, "--port", str(ports["kvloom"])]}
    commands["bare"] = [sys.executable, "-m", "benches.server.http_cost", "--bare", str(ports["bare"])]
    with ExitStack() as stack:
        for name, command in commands.items():
            server = stack.enter_context(ServerProcess(command))
            server.first_answer_s(Target(f"http://127.0.0.1:{ports[name]}", "m"), 60, PROMPT)
            asyncio.run(all_streams(ports[name], WARM, 1))
        rounds = [one_round(ports, options.streams, bool(turn % 2)) for turn in range(options.rounds)]
    for turn, values in enumerate(rounds):
        print(json.dumps({"bench": "http_cost", "round": turn, **values}))
    medians = {name: round(statistics.median(values[name] for values in rounds), 2) for name in rounds[0]}
    print(json.dumps({"bench": "http_cost", "streams": options.streams, **medians}))


if __name__ == "__main__":
    main()
