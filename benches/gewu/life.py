"""What Gewu costs the device besides its calls: memory taken and given back, neighbours, kills, a soak.

`python -m benches.gewu.life [MODEL] [SOAK_S]`, by default smollm2 and 60 s; MODEL "fake" leaves the real engine out.
`python -m benches.gewu.figures` runs all benches of Gewu.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.gewu.daemons import ABI, Client, DaemonProcess, compile_c, make_model, until

from kvloom.checkpoints.demo_models import find_model

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "gewu" / "chat.c"
MIB = 2**20
ROUNDS = 20
SOAK_CLIENTS, SOAK_ROUND_S = 8, 5.0
NEIGHBOUR_S = 3.0
IDLE_UNLOAD_S = 2.0
_IN_PREFILL_S = 0.2  # after this much processor time a worker has certainly left the tokenizer
_QUIET_S = 0.1  # a worker that takes no processor time for this long is idle


def main() -> None:
    measure(sys.argv[1] if len(sys.argv) > 1 else "smollm2", float(sys.argv[2]) if len(sys.argv) > 2 else 60.0)


def measure(model: str, soak_s: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = make_model(folder / "model")
        with_daemon(folder / "calls", {"rate": 20}, lambda d: bench_kill(d, small))
        with_daemon(folder / "budget", {}, lambda d: bench_over_budget(d, folder), GEWU_MEM_BUDGET="256M")
        with_daemon(folder / "many", {}, lambda d: bench_many(d, small))
        with_daemon(folder / "soak", {"rate": 500}, lambda d: bench_soak(d, small, soak_s))
        if model != "fake":
            path = find_model(model).resolve()
            with_daemon(folder / "share", None, lambda d: bench_sharing(d, path))
            with_daemon(folder / "turns", None, lambda d: bench_turns(d, path))
            with_daemon(folder / "abort", None, lambda d: bench_abort(d, path))
            with_daemon(folder / "side", None, lambda d: bench_neighbour(d, path))
            with_daemon(folder / "idle", None, lambda d: bench_unload(d, path), GEWU_IDLE_UNLOAD_S=str(IDLE_UNLOAD_S))


def with_daemon(
    folder: Path, fake: dict[str, Any] | None, bench: Callable[[DaemonProcess], None], **environ: str
) -> None:
    folder.mkdir()
    daemon = DaemonProcess(folder, fake, **environ)
    try:
        bench(daemon)
    finally:
        daemon.stop()


def emit(engine: str, name: str, value: float, unit: str) -> None:
    line = {"bench": "gewu_life", "engine": engine, "name": name, "value": round(value, 4), "unit": unit}
    print(json.dumps(line), flush=True)


# -- with the fake engine


def bench_kill(daemon: DaemonProcess, model: Path) -> None:
    """The time from kill -9 of a client with 5 running sessions until the daemon has removed them all."""
    times_s = []
    for _ in range(ROUNDS):
        client = Client(daemon)
        for _ in range(5):
            client.submit(client.create(model))
        began_s = time.monotonic()
        client.process.kill()
        until(lambda: daemon.status()["sessions"] == [])
        times_s.append(time.monotonic() - began_s)
        close_pipes(client)
    emit("fake", "killed_client_noticed_max", 1e3 * max(times_s), "ms")


def bench_over_budget(daemon: DaemonProcess, folder: Path) -> None:
    """A Create that cannot fit: the time until it is refused, and the daemon's peak memory."""
    huge = make_model(folder / "huge", 8 << 30)
    client = Client(daemon)
    client.call("create", json.dumps({"model": "/nowhere"}))  # the client has started and is connected
    times_s = []
    for _ in range(ROUNDS):
        began_s = time.monotonic()
        error, _ = client.call("create", json.dumps({"model": str(huge)}))
        times_s.append(time.monotonic() - began_s)
        assert error == 203
    client.close()
    emit("fake", "over_budget_create_max", 1e3 * max(times_s), "ms")
    emit("fake", "over_budget_daemon_peak", proc_bytes(daemon.process.pid, "status", "VmHWM") / MIB, "MiB")


def bench_many(daemon: DaemonProcess, model: Path) -> None:
    """The memory that 100 sessions on one model take, in the app and in the daemon."""
    client = Client(daemon)
    client.create(model)
    pids = {"client": client.process.pid, "daemon": daemon.process.pid}
    before = {name: rss_bytes(pid) for name, pid in pids.items()}
    for _ in range(100):
        client.create(model)
    for name, pid in pids.items():
        emit("fake", f"100_sessions_{name}_memory", (rss_bytes(pid) - before[name]) / MIB, "MiB")
    emit("fake", "100_sessions_loads", daemon.model()["loads"], "loads")
    client.close()


def bench_soak(daemon: DaemonProcess, model: Path, soak_s: float) -> None:
    """Random calls of 8 clients with 16 threads each; the daemon's resources at the end and after the first round."""
    program = compile_c(ABI / "stress.c")
    command = [str(program), str(model), str(SOAK_ROUND_S)]
    end_s = time.monotonic() + soak_s
    rounds: list[dict[str, int]] = []
    while not rounds or time.monotonic() < end_s:
        clients = [
            subprocess.Popen(command, env=daemon.environ, stdout=subprocess.DEVNULL) for _ in range(SOAK_CLIENTS)
        ]
        assert [client.wait() for client in clients] == [0] * SOAK_CLIENTS
        until(lambda: daemon.status()["sessions"] == [])
        rounds.append(held(daemon.process.pid))
        print(f"soak round {len(rounds)}: {rounds[-1]}", file=sys.stderr, flush=True)
    emit("fake", "soak", soak_s, "s")
    emit("fake", "soak_rounds", len(rounds), "rounds")
    for name, first in (("soak_rss_drift", rounds[0]), ("soak_rss_drift_of_second_half", rounds[len(rounds) // 2])):
        emit("fake", name, 100 * (rounds[-1]["rss_bytes"] / first["rss_bytes"] - 1), "%")
    emit("fake", "soak_files_drift", rounds[-1]["files"] - rounds[0]["files"], "files")
    emit("fake", "soak_threads_drift", rounds[-1]["threads"] - rounds[0]["threads"], "threads")
    emit("fake", "soak_stuck_sessions", len(daemon.status()["sessions"]), "sessions")


# -- with the real engine


def bench_sharing(daemon: DaemonProcess, model: Path) -> None:
    """The memory that a second app on a loaded model adds, in the daemon and in the app."""
    first = Client(daemon)
    first.ask(first.create(model), max_tokens=8)
    pids = (daemon.process.pid, daemon.model()["pid"])
    before = sum(pss_bytes(pid) for pid in pids)
    program = compile_c(EXAMPLE)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([str(program), str(model)], env=daemon.environ, **pipes) as app:
        assert app.stdin is not None
        app.stdin.write("hi\n")
        app.stdin.flush()
        until(lambda: any(session["requests"] for session in daemon.status()["sessions"]))
        emit("real", "second_app_rss", rss_bytes(app.pid) / MIB, "MiB")
        emit("real", "second_app_adds_pss", (sum(pss_bytes(pid) for pid in pids) - before) / MIB, "MiB")
        emit("real", "second_app_loads", daemon.model()["loads"] - 1, "loads")
        app.stdin.close()
        app.kill()
    first.close()


def bench_turns(daemon: DaemonProcess, model: Path) -> None:
    """The second turn of a chat: tokens computed for its prompt, minus the tokens that are new in it."""
    client = Client(daemon)
    session = client.create(model)
    messages = [{"role": "user", "content": "Name three cities. " + "Answer in few words. " * 20}]
    first = ask_counted(daemon, client, session, messages)
    messages += [{"role": "assistant", "content": first["text"]}, {"role": "user", "content": "And three rivers?"}]
    second = ask_counted(daemon, client, session, messages)
    computed = second["prompt_tokens"] - second["cached_tokens"]
    new = second["prompt_tokens"] - first["prompt_tokens"] - first["output_tokens"]
    emit("real", "second_turn_computed_beyond_new", computed - new, "tokens")
    client.close()


def ask_counted(daemon: DaemonProcess, client: Client, session: int, messages: list[dict[str, str]]) -> dict[str, Any]:
    """A streamed request's text, and its token counts as the status shows them while it runs."""
    context = client.submit(session, messages=messages, max_tokens=40)
    client.call("started", context)
    counts: dict[str, Any] = {}
    while requests := daemon.status()["sessions"][0]["requests"]:
        counts = requests[0]
    text = "".join(reply["message"]["content"] for reply in client.wait(context))
    return {**counts, "text": text}


def bench_abort(daemon: DaemonProcess, model: Path) -> None:
    """The time from Abort until the worker stops computing, during a decode and in the middle of a prefill."""
    client = Client(daemon)
    session = client.create(model)
    client.ask(session, max_tokens=4)
    pid = daemon.model()["pid"]
    for name, content in (("decode", "Tell a long story."), ("prefill", "word " * 3000)):
        times_s = []
        for i in range(ROUNDS):
            body = {"messages": [{"role": "user", "content": f"{i} {content}"}], "stream": True}
            context = 10_000 + ROUNDS * (name == "prefill") + i
            before_s = running_s(pid)
            _, request = client.call("submit", session, json.dumps(body), context)
            if name == "decode":
                client.call("started", context)
            else:
                until(lambda base_s=before_s: running_s(pid) > base_s + _IN_PREFILL_S)
            began_s = time.monotonic()
            client.call("abort", session, request)
            times_s.append(idle_at_s(pid) - began_s)
        emit("real", f"abort_to_idle_{name}_p50", 1e3 * sorted(times_s)[ROUNDS // 2], "ms")
        emit("real", f"abort_to_idle_{name}_max", 1e3 * max(times_s), "ms")
    client.close()


def bench_neighbour(daemon: DaemonProcess, model: Path) -> None:
    """The speed of a computing process beside BACKGROUND inference, as a share of its speed alone."""
    client = Client(daemon)
    sessions = [client.create(model, qos="background") for _ in range(4)]
    client.ask(sessions[0], max_tokens=4)
    with multiprocessing.Pool(1) as pool:
        alone = pool.apply(count_rounds, (NEIGHBOUR_S,))
        contexts = [client.submit(session, max_tokens=1500) for session in sessions]
        client.call("started", contexts[0])
        beside = pool.apply(count_rounds, (NEIGHBOUR_S,))
    emit("real", "neighbour_speed_beside_background", 100 * beside / alone, "%")
    client.close()


def bench_unload(daemon: DaemonProcess, model: Path) -> None:
    """Memory given back when an idle model goes, and its second load against the first, page cache warm both times."""
    for file in [model] if model.is_file() else model.iterdir():
        file.read_bytes()
    client = Client(daemon)
    session = client.create(model)
    client.ask(session, max_tokens=4)
    done_s = time.monotonic()
    first = daemon.model()
    used = pss_bytes(first["pid"])
    until(lambda: not Path(f"/proc/{first['pid']}").exists(), limit_s=60)
    emit("real", "idle_unload_after_deadline", time.monotonic() - done_s - IDLE_UNLOAD_S, "s")
    emit("real", "idle_unload_returned", used / MIB, "MiB")
    client.ask(session, max_tokens=4)
    emit("real", "reload_of_first_load", daemon.model()["load_s"] / first["load_s"], "x")
    client.close()


def count_rounds(seconds: float) -> int:
    """The number of rounds of fixed work that this process does in this time."""
    end_s = time.perf_counter() + seconds
    rounds = 0
    while time.perf_counter() < end_s:
        sum(range(1000))
        rounds += 1
    return rounds


def idle_at_s(pid: int) -> float:
    """When the process last took processor time, once it takes none."""
    last, last_s = running_s(pid), time.monotonic()
    while time.monotonic() - last_s < _QUIET_S:
        time.sleep(0.001)
        now = running_s(pid)
        if now != last:
            last, last_s = now, time.monotonic()
    return last_s


def running_s(pid: int) -> float:
    """Processor time of all threads of a process so far."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def proc_bytes(pid: int, file: str, name: str) -> int:
    (line,) = [x for x in Path(f"/proc/{pid}/{file}").read_text().splitlines() if x.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def held(pid: int) -> dict[str, int]:
    """The resources of a process that a leak would increase."""
    files, threads = (len(os.listdir(f"/proc/{pid}/{name}")) for name in ("fd", "task"))
    return {"rss_bytes": rss_bytes(pid), "files": files, "threads": threads}


def rss_bytes(pid: int) -> int:
    return proc_bytes(pid, "status", "VmRSS")


def pss_bytes(pid: int) -> int:
    return proc_bytes(pid, "smaps_rollup", "Pss")


def close_pipes(client: Client) -> None:
    client.process.wait()
    for pipe in (client.process.stdin, client.process.stdout):
        assert pipe is not None
        pipe.close()


if __name__ == "__main__":
    main()
