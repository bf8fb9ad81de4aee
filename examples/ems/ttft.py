"""Time to first token of a prompt: computed, found in the engine, and found in the KV pool after an engine restart.

    python examples/ems/ttft.py                  # the demo model, 1,000 tokens, five prompts, ttft.png

Starts `kvloom pool agent` and `kvloom serve` as a user would, asks over HTTP, stops the server, starts it again and
asks the same. Prompts are random tokens, since their content does not affect the time. Answers must be the same.
"""

import argparse
import importlib.util
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import httpx

from kvloom.checkpoints.demo_models import find_model
from kvloom.contract.errors import ModelError

KVLOOM = (sys.executable, "-m", "kvloom.cli")
READY = re.compile(r"is served on (http://\S+:\d+)\.")
NUM_ANSWER = 16  # tokens
PHASES = ("cold", "warm in the engine", "warm from EMS")
BLOCK_SIZE = 32  # tokens
LIMIT_S = 120.0
SAVED = re.compile(r"^\S*kv_tier_saved_blocks_total\{.*\} (\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Answer:
    """One request: `ttft_ms` from sending it to the first token; `num_cached` prompt tokens were not computed."""

    phase: str
    ttft_ms: float
    num_cached: int
    text: str


@contextmanager
def agent(socket: Path, pool: str) -> Iterator[None]:
    """A node agent on `socket`, with `pool` of memory (its `--pool`), until the context ends."""
    command = [*KVLOOM, "pool", "agent", f"--socket={socket}", f"--pool={pool}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not socket.exists():
            if process.poll() is not None:
                raise SystemExit("the agent did not start")
            time.sleep(0.01)
        yield
    finally:
        process.terminate()
        process.wait()


@contextmanager
def server(folder: Path, model: Path, socket: Path) -> Iterator[httpx.Client]:
    """`kvloom serve` with the agent's pool as its KV pool."""
    config = {
        "BackendConfig": {
            "kvPoolConfig": {"backend": "ems", "socketPath": str(socket), "timeoutMs": 2000},
            "ScheduleConfig": {"cacheBlockSize": BLOCK_SIZE},
            "ModelDeployConfig": {"ModelConfig": [{"modelName": "model", "modelWeightPath": str(model)}]},
        },
        "ServerConfig": {},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    path.chmod(0o640)
    process = subprocess.Popen(
        [*KVLOOM, "serve", "--config", str(path), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        found = next((found for line in process.stdout if (found := READY.search(line))), None)
        if found is None:
            raise SystemExit("the server did not start")
        with httpx.Client(base_url=found[1], timeout=120, trust_env=False) as client:
            ask(client, "warm up", [1, 2, 3])
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def ask(client: httpx.Client, phase: str, prompt: list[int]) -> Answer:
    """Send the prompt and read the stream."""
    body = {
        "model": "model",
        "prompt": prompt,
        "max_tokens": NUM_ANSWER,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, ttft_s, num_cached, started_s = "", 0.0, 0, time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            ttft_s = ttft_s or time.perf_counter() - started_s
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise SystemExit(f"the server answered: {chunk['error']}")
            text += "".join(choice["text"] for choice in chunk["choices"])
            if chunk.get("usage"):
                num_cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Answer(phase, round(ttft_s * 1000, 1), num_cached, text)


def wait_until_saved(client: httpx.Client, prompts: list[list[int]]) -> None:
    """Wait until the pool has the whole blocks of all prompts: they are saved in the background, and what a busy engine
    does not save is saved when it is asked for again.
    """
    wanted, deadline_s = sum(len(prompt) // BLOCK_SIZE for prompt in prompts), time.monotonic() + LIMIT_S
    while int(SAVED.findall(client.get("/metrics").text)[0]) < wanted:
        if time.monotonic() > deadline_s:
            raise SystemExit(f"the pool does not have all blocks after {LIMIT_S:.0f} s")
        for prompt in prompts:
            ask(client, "again", prompt)
        time.sleep(0.1)


def measure(model: Path, num_tokens: int, rounds: int, pool: str = "1G") -> list[Answer]:
    """Send each of `rounds` prompts cold and a second time, and then to a new server, which loads it from the pool."""
    chance = Random(1)
    prompts = [[chance.randrange(1000, 20000) for _ in range(num_tokens)] for _ in range(rounds)]
    answers = []
    with tempfile.TemporaryDirectory(prefix="kvloom-ttft-") as name:
        folder = Path(name)
        socket = folder / "ems.sock"
        with agent(socket, pool):
            with server(folder, model, socket) as client:
                for prompt in prompts:
                    answers += [ask(client, phase, prompt) for phase in PHASES[:2]]
                wait_until_saved(client, prompts)
            with server(folder, model, socket) as client:
                answers += [ask(client, PHASES[2], prompt) for prompt in prompts]
    return answers


def check(answers: list[Answer], rounds: int) -> None:
    """Check that the answer to a prompt does not depend on the source of its KV cache."""
    cold, warm, loaded = ([answer.text for answer in answers if answer.phase == phase] for phase in PHASES)
    if not len(cold) == rounds or cold != warm or cold != loaded:
        raise SystemExit("answers differ: that is a bug")


def plot(answers: list[Answer], title: str, path: Path) -> None:
    """Medians as bars, each request as a dot; prints a line instead where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed (pip install 'kvloom[plot]')")
        return
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for x, phase in enumerate(PHASES):
        times_ms = [answer.ttft_ms for answer in answers if answer.phase == phase]
        axes.bar(x, statistics.median(times_ms), width=0.55, color=("#8a8f98", "#2a6fb0", "#2f9e6e")[x])
        height = max(times_ms)
        axes.annotate(
            f"{statistics.median(times_ms):,.0f} ms", (x, height), (0, 6), textcoords="offset points", ha="center"
        )
        axes.plot([x] * len(times_ms), times_ms, "k.", alpha=0.5)
    axes.set_xticks(range(len(PHASES)), PHASES)
    axes.set(ylabel="time to first token, ms", title=title, ylim=(0, None))
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    print(f"plot: {path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2", help="a folder, a .gguf file or a fetched model's name")
    parser.add_argument("--tokens", type=int, default=1000, help="of a prompt")
    parser.add_argument("--rounds", type=int, default=5, help="prompts")
    parser.add_argument("--plot", type=Path, default=Path("ttft.png"), help="where the plot goes")
    options = parser.parse_args()
    if options.tokens < 1 or options.rounds < 1:
        parser.error("--tokens and --rounds must be at least 1")
    try:
        model = find_model(options.model)
    except ModelError as error:
        raise SystemExit(str(error)) from None
    answers = measure(model, options.tokens, options.rounds)
    check(answers, options.rounds)
    for phase in PHASES:
        own = [asdict(answer) for answer in answers if answer.phase == phase]
        row = {"bench": "ttft", "phase": phase, "num_prompt_tokens": options.tokens, "rounds": options.rounds}
        row["num_cached_tokens"] = min(answer["num_cached"] for answer in own)
        row["ttft_ms"] = statistics.median(answer["ttft_ms"] for answer in own)
        print(json.dumps(row))
    plot(answers, f"{options.tokens:,}-token prompt, {model.stem}", options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
