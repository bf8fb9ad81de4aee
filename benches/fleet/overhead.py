"""What a fleet of one replica costs over a plain server with the same mock: `python -m benches.fleet.overhead`.

plain   `kvloom serve`
fleet   `kvloom fleet run`: a separate server, one replica on Ray
proxy   the same application under `serve run`: the ingress is an actor behind Ray's HTTP proxy
bare    an ASGI app that streams as many events and does nothing else, on uvicorn
ray     the same app as a deployment of Ray Serve, behind its proxy: the part of the cost that is Ray's

All servers run, and take turns; only one has work at a time. One JSON line a round, server and number of streams,
then one with the medians and the ratios to plain (ray: to bare). With --step-ms and --token-ms the mock takes the time
of a real model. `cpu_us` is the processor time a token of each process, including the client.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import psutil
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

from kvloom.bench.client import Target, complete
from kvloom.fleet.args import FleetArgs, Mock
from kvloom.fleet.plan import make_plan
from kvloom.net.listening import listen
from kvloom.processes.inside import signal_at_end_of_thread
from kvloom.server.run.main import serve

SERVERS = ("plain", "fleet", "proxy", "bare", "ray")
_EVENT = b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": null}]}\n\n'
_LAST = b'data: {"choices": [], "usage": {"completion_tokens": %d}}\n\ndata: [DONE]\n\n'
_KINDS = (
    ("ServeReplica:fleet:engines", "engine"), ("ServeReplica", "ingress"), ("ProxyActor", "proxy"),
    ("kvloom.rank.main", "rank"), ("ray", "Ray's own"), ("gcs_server", "Ray's own"),
)  # fmt: skip


# -- the servers, each in its own process


async def events(request: Any) -> StreamingResponse:
    body = await request.json()
    number = body["max_tokens"]

    async def stream() -> Any:
        for _ in range(number):
            yield _EVENT
            await asyncio.sleep(0)
        yield _LAST % number

    return StreamingResponse(stream(), media_type="text/event-stream")


BARE = Starlette(routes=[Route("/v1/completions", events, methods=["POST"])])


class Bare:
    """The class of the deployment `ray`."""


def args_of(options: argparse.Namespace) -> FleetArgs:
    mock = Mock(step_ms=options.step_ms, token_ms=options.token_ms)
    return FleetArgs(backend="fake", max_seq_len=4096, mock=mock, cpus_per_rank=0.1, port=options.port)


def be(name: str, options: argparse.Namespace) -> None:
    """Run the server in this process until a signal comes."""
    if name == "plain":
        serve(make_plan(args_of(options), is_behind_proxy=False).config("here"))
    elif name == "fleet":
        plan = make_plan(args_of(options), is_behind_proxy=False)
        serve(
            plan.config("here"),
            lambda config: import_module("kvloom.fleet.local").LocalFleet(plan, config, False, print),
        )
    elif name == "bare":
        import_module("uvicorn").run(BARE, port=options.port, log_level="error", access_log=False)
    else:
        local: Any = import_module("kvloom.fleet.local")  # imported first: it sets environment variables that Ray reads
        ray, ray_serve, app = (import_module(each) for each in ("ray", "ray.serve", "kvloom.fleet.app"))
        ray.init(
            address="local", num_cpus=8, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False
        )
        ray_serve.start(http_options={"port": options.port}, proxy_location="HeadOnly")
        if name == "proxy":
            target = app.application(make_plan(args_of(options)))
        else:
            target = ray_serve.deployment(ray_serve.ingress(BARE)(Bare)).options(max_ongoing_requests=1 << 16).bind()
        try:
            ray_serve.run(target, name="fleet" if name == "proxy" else "bare", blocking=True)
        finally:
            local._end()


@contextlib.contextmanager
def started(name: str, options: argparse.Namespace) -> Iterator[tuple[Target, int]]:
    """Start a server; its target and process id, once it answers."""
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    times = ["--port", str(port), "--step-ms", str(options.step_ms), "--token-ms", str(options.token_ms)]
    process = subprocess.Popen(
        [sys.executable, "-m", "benches.fleet.overhead", "--be", name, *times],
        stdout=subprocess.DEVNULL, stderr=None if options.verbose else subprocess.DEVNULL,
        preexec_fn=signal_at_end_of_thread,
    )  # fmt: skip
    target = Target(f"http://127.0.0.1:{port}", "mock")
    try:
        until_s = time.monotonic() + 90
        while True:
            try:
                asyncio.run(load(target, 8, 8))
                break
            except Exception:
                assert process.poll() is None, f"{name} has ended"
                assert time.monotonic() < until_s, f"{name} does not answer"
                time.sleep(0.2)
        yield target, process.pid
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


# -- the load


async def load(target: Target, num_streams: int, num_tokens: int) -> tuple[int, float]:
    """Load the server with concurrent streams: the number of tokens, and the seconds that they took."""
    began_s = time.perf_counter()
    prompts = [[65 + number, *range(70, 86)] for number in range(num_streams)]
    answers = await asyncio.gather(*(complete(target, prompt, num_tokens) for prompt in prompts))
    return sum(answer.num_tokens for answer in answers), time.perf_counter() - began_s


async def ttft_s(target: Target, count: int) -> float:
    """The median TTFT of `count` requests, sent one after the other."""
    return statistics.median([(await complete(target, [66, number], 2)).ttft_s for number in range(count)])


def processor_s(pid: int) -> dict[str, float]:
    """Processor time of a server's processes and of this client, in seconds, by kind of process."""
    found: dict[str, float] = defaultdict(float)
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            title = " ".join(process.cmdline())
            kind = "server" if process.pid == pid else next((k for part, k in _KINDS if part in title), "others")
            times = process.cpu_times()
            found[kind] += times.user + times.system
    found["client"] = time.process_time()
    return found


def one_round(target: Target, pid: int, num_streams: int, num_tokens: int) -> dict[str, Any]:
    before = processor_s(pid)
    tokens, wall_s = asyncio.run(load(target, num_streams, num_tokens))
    spent = {kind: 1e6 * (after - before[kind]) / tokens for kind, after in processor_s(pid).items()}
    return {
        "tok_s": round(tokens / wall_s),
        "ttft_ms": round(1e3 * asyncio.run(ttft_s(target, 11)), 2),
        "cpu_us": {kind: round(us, 1) for kind, us in spent.items() if us >= 0.05}
        | {"all": round(sum(spent.values()), 1)},
    }


def median_of(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = {kind for values in rounds for kind in values["cpu_us"]}
    return {
        "tok_s": statistics.median(values["tok_s"] for values in rounds),
        "ttft_ms": statistics.median(values["ttft_ms"] for values in rounds),
        "cpu_us": {k: round(statistics.median(values["cpu_us"].get(k, 0.0) for values in rounds), 1) for k in kinds},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=["plain", "fleet"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=512, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--token-ms", type=float, default=0.0)
    parser.add_argument("--verbose", action="store_true", help="show what the servers say")
    parser.add_argument("--be", choices=SERVERS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        be(options.be, options)
        return
    common = {"bench": "fleet_overhead", "step_ms": options.step_ms, "token_ms": options.token_ms}
    found: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        running = {name: stack.enter_context(started(name, options)) for name in options.servers}
        for turn in range(options.rounds):
            for streams in options.streams:
                for name in list(running)[:: 1 if turn % 2 else -1]:
                    values = one_round(*running[name], streams, options.tokens)
                    found[name, streams].append(values)
                    print(
                        json.dumps({**common, "server": name, "streams": streams, "round": turn, **values}), flush=True
                    )
    medians = {key: median_of(rounds) for key, rounds in found.items()}
    for (name, streams), values in medians.items():
        peer = medians.get(("bare" if name == "ray" else "plain", streams))
        if peer is not None:
            values |= {"ratio": round(values["tok_s"] / peer["tok_s"], 3)}
            values |= {"added_ttft_ms": round(values["ttft_ms"] - peer["ttft_ms"], 2)}
        print(json.dumps({**common, "server": name, "streams": streams, "medians": True, **values}), flush=True)


if __name__ == "__main__":
    main()
