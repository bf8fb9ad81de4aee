"""The conversations of `kvloom bench --scenario conversation` on kvloom and on llama.cpp's server, in turns.

    python -m benches.server.conversations --peer llama-server [--model FILE.gguf] [--rounds 2] [--save-json FILE]

Both serve one GGUF file, a random model of Qwen3.5-0.8B's shape if none is given. Every round plays the script once on
each, with messages that no cache has seen, while the other one is halted. kvloom saves its cache to a pool of its own,
and at the end it is started again and plays its last script once more. One JSON line a server and kind of request:
medians over all rounds of the tokens computed again (`again`; `again_most`, `again_sum`) and of the time to the first
token; `rss_mb` is the peak of resident memory. Lines come as soon as they are known; how long each script took is told
on the standard error.
"""

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import uvloop
from tests.support.pool.faults import AgentProcess

from benches.server.hybrid_gguf import make_hybrid_gguf
from kvloom.bench.client import Target
from kvloom.bench.conversation import Exchange, Player, Script, of_kinds
from kvloom.bench.load import new_seed
from kvloom.bench.process import ServerProcess, free_port
from kvloom.checkpoints.demo_models import find_model

START_LIMIT_S = 300.0
CONTEXT = 8192
MODEL = "m"


def our_command(folder: Path, model: Path, port: int) -> list[str]:
    """`kvloom serve` over the pool at ems.sock in `folder`."""
    models = [{"modelName": MODEL, "modelWeightPath": str(model)}]
    pool = {"backend": "ems", "socketPath": str(folder / "ems.sock"), "timeoutMs": 5000}
    document = {
        "ServerConfig": {"port": port},
        "BackendConfig": {"kvPoolConfig": pool, "ModelDeployConfig": {"maxSeqLen": CONTEXT, "ModelConfig": models}},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(document))
    path.chmod(0o640)
    return [sys.executable, "-m", "kvloom.cli", "serve", "--config", str(path)]


def their_command(program: str, model: Path, port: int) -> list[str]:
    """llama.cpp's server as shipped, but for the context's length."""
    options = ["-m", str(model), "--host", "127.0.0.1", "--port", str(port), "-c", str(4 * CONTEXT)]
    return [*shlex.split(program), *options]


class Server:
    """One of the two; it runs while it plays, and is halted otherwise."""

    def __init__(self, name: str, command: Sequence[str], port: int, stack: ExitStack) -> None:
        self.name, self.target = name, Target(f"http://127.0.0.1:{port}", MODEL)
        self._process = stack.enter_context(ServerProcess(command))
        self._process.first_answer_s(self.target, START_LIMIT_S, [1000] * 16)
        self._process.set_running(False)

    def play(self, player: Player) -> list[Exchange]:
        started = time.monotonic()
        self._process.set_running(True)
        try:
            found = uvloop.run(player.play(self.target))
        finally:
            self._process.set_running(False)
        seconds = time.monotonic() - started
        print(f"{self.name}: {len(found)} answers in {seconds:.0f} s", file=sys.stderr, flush=True)
        return found

    @property
    def rss_mb(self) -> int:
        return round(self._process.peak_rss_bytes() / 1e6)


def rows(name: str, exchanges: Sequence[Exchange], rss_mb: int) -> list[dict[str, Any]]:
    """One a kind of request."""
    found = []
    for kind, some in of_kinds(exchanges).items():
        again, ttft = [each.num_recomputed for each in some], [each.ttft_ms for each in some]
        counts = {"num": len(some), "again": statistics.median(again), "again_most": max(again)}
        counts |= {"again_sum": sum(again), "ttft_ms": round(statistics.median(ttft), 1), "ttft_most_ms": max(ttft)}
        found.append({"bench": "conversations", "server": name, "kind": kind, **counts, "rss_mb": rss_mb})
    return found


def measure(peer: str, model: Path, rounds: int, script: Script, folder: Path) -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        stack.enter_context(AgentProcess(folder / "ems.sock", "--pool=4G", "--segment=64M", "--slab=16M"))
        ports = free_port(), free_port()
        own = our_command(folder, model, ports[0])
        first = stack.enter_context(ExitStack())
        servers = [Server("kvloom", own, ports[0], first)]
        servers.append(Server("llama.cpp", their_command(peer, model, ports[1]), ports[1], stack))
        found: dict[str, list[Exchange]] = {server.name: [] for server in servers}
        last = Player(script, "")
        for turn in range(rounds):
            for server in servers if turn % 2 == 0 else servers[::-1]:
                player = Player(script, f"{new_seed()}-{turn}")
                found[server.name] += server.play(player)
                last = player if server is servers[0] else last
        for server in servers:
            yield from rows(server.name, found[server.name], server.rss_mb)
        first.close()
        again = Server("kvloom, started again", own, ports[0], stack)
        yield from rows(again.name, again.play(last), again.rss_mb)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="llama.cpp's server and further options of it")
    parser.add_argument("--model", type=Path, help="a GGUF file; a random one if not given")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--num-turns", type=int, default=12)
    parser.add_argument("--num-branches", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=200)
    parser.add_argument("--save-json", type=Path, help="append the lines here instead of printing them")
    args = parser.parse_args()
    script = Script(num_turns=args.num_turns, num_branches=args.num_branches, output_len=args.output_len)
    with tempfile.TemporaryDirectory() as name:
        model = args.model or make_hybrid_gguf(find_model("smollm2"), Path(name) / "hybrid.gguf")
        for row in measure(args.peer, model, max(1, args.rounds), script, Path(name)):
            with args.save_json.open("a", encoding="utf-8") if args.save_json else nullcontext(sys.stdout) as out:
                print(json.dumps(row), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
