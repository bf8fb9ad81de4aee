"""Gewu over the real small model: the demo, KV kept between the turns of a session, a full context."""

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloom.gewu.codes import Code
from kvloom.gewu.modelfiles import open_files
from kvloom.gewu.prober.probe import probe
from tests.support.gewu.daemons import DEMO_MODEL, Client, DaemonProcess, compile_demo, has_nlohmann, run_program
from tests.support.waiting import until

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def daemon(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    alias = f"{DEMO_MODEL}={smollm2_path.resolve()}"
    found = DaemonProcess(tmp_path_factory.mktemp("daemon"), None, "--alias", alias)
    yield found
    found.stop()


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    found = Client(daemon)
    yield found
    found.close()


def text_of(replies: list[dict]) -> str:
    return "".join(reply["message"]["content"] for reply in replies)


@pytest.mark.skipif(not has_nlohmann(), reason="needs g++ and nlohmann/json.hpp (Debian: nlohmann-json3-dev)")
def test_the_demo_of_the_specification(daemon, tmp_path):
    times = os.environ.get("DEMO_TIMES", "3")
    run_program(compile_demo("-std=c++17"), daemon, times, timeout_s=100 * int(times))
    assert daemon.model()["loads"] == 1


def test_streamed_equals_whole_and_the_second_turn_computes_only_what_is_new(daemon, client, smollm2_path):
    session = client.create(smollm2_path)
    messages = [{"role": "user", "content": "What is the capital of France? " + "Answer in a few words. " * 10}]
    first = text_of(client.ask(session, messages=messages, max_tokens=12))
    (whole,) = client.ask(session, messages=messages, max_tokens=12, stream=False)
    assert whole["message"]["content"] == first
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And of Italy?"}]
    context = client.submit(session, messages=messages, max_tokens=200)
    client.call("started", context)
    found = next(s for s in daemon.status()["sessions"] if s["session"] == session)
    (request,) = found["requests"]
    token_bytes = 2 * 30 * 3 * 64 * 2  # keys and values, layers, KV heads, width of a head, bfloat16
    assert found["kv_bytes"] >= request["prompt_tokens"] * token_bytes
    assert request["prompt_tokens"] - request["cached_tokens"] <= 50  # the new turn, its template, and up to 16
    assert request["cached_tokens"] > 50
    client.wait(context)
    until(lambda: all(s["kv_bytes"] == 0 for s in daemon.status()["sessions"]))


def test_a_full_context_ends_with_length(client, smollm2_path):
    session = client.create(smollm2_path)
    long = [{"role": "user", "content": "word " * 9000}]
    (only,) = client.ask(session, messages=long)
    assert (only["finish_reason"], only["message"]["content"]) == ("length", "")
    assert client.ask(session, max_tokens=2)[-1]["finish_reason"] == "length"


def test_a_text_that_no_context_holds_is_not_tokenised(client, smollm2_path):
    """Tokenising 15 MiB of words would occupy the model's process for a minute, and delay all its clients."""
    huge, other = client.create(smollm2_path), client.create(smollm2_path)
    context = client.submit(huge, messages=[{"role": "user", "content": "word " * (3 << 20)}])
    assert client.ask(other, max_tokens=2)[-1]["finish_reason"] == "length"
    (only,) = client.wait(context)
    assert (only["finish_reason"], only["message"]["content"]) == ("length", "")


def test_under_pressure_a_busy_model_gives_back_the_kv_of_idle_sessions(smollm2_path, tmp_path):
    daemon = DaemonProcess(tmp_path, None)
    daemon.psi_file.write_text("some avg10=0 total=0\nfull avg10=0 total=0\n")
    client = Client(daemon)
    try:
        idle, busy = client.create(smollm2_path), client.create(smollm2_path, qos="user_interactive")
        messages = [{"role": "user", "content": "word " * 800}]
        answer = text_of(client.ask(idle, messages=messages, max_tokens=4))
        before = pss_bytes(daemon.model()["pid"])
        story = [{"role": "user", "content": "Tell a long story."}]
        context = client.submit(busy, max_tokens=400, messages=story)  # needs less than the idle one gives back
        client.call("started", context)
        daemon.psi_file.write_text("some avg10=9 total=200000\nfull avg10=0 total=0\n")
        until(lambda: daemon.status()["memory"]["pressure"] == 1)
        token_bytes = 2 * 30 * 3 * 64 * 2  # keys and values, layers, KV heads, width of a head, bfloat16
        until(lambda: before - pss_bytes(daemon.model()["pid"]) > 300 * token_bytes)
        client.call("destroy", busy)
        assert text_of(client.ask(idle, messages=messages, max_tokens=4)) == answer
    finally:
        client.close()
        daemon.stop()


@pytest.mark.usefixtures("really_started")
@pytest.mark.parametrize("budget_mib", [150, 360])
def test_all_processes_together_stay_within_the_budget(budget_mib, smollm2_path, tmp_path):
    daemon = DaemonProcess(tmp_path, None, GEWU_MEM_BUDGET=f"{budget_mib}M")
    client = Client(daemon)
    taken: list[int] = []
    has_ended = threading.Event()

    def watch() -> None:
        while not has_ended.wait(0.02):
            taken.append(sum(pss_bytes(pid) for pid in family(daemon.process.pid)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        error, session = client.call("create", json.dumps({"model": str(smollm2_path)}))
        if budget_mib == 150:  # too little for 100 MiB of weights, a Python process and the daemon
            assert error == Code.NOMEM
        else:
            until(lambda: daemon.model()["state"] == "ready")
            words = [{"role": "user", "content": "word " * 200}]
            assert client.ask(session, messages=words, max_tokens=20)[-1]["finish_reason"] in ("stop", "length")
            assert daemon.status()["memory"]["held_bytes"] >= pss_bytes(daemon.model()["pid"])
    finally:
        has_ended.set()
        watcher.join()
        client.close()
        daemon.stop()
    assert 0 < max(taken) <= budget_mib << 20


def test_a_worker_takes_what_was_foretold(daemon, client, smollm2_path):
    fd = os.open(smollm2_path, os.O_RDONLY)
    try:
        files = open_files(fd)
    finally:
        os.close(fd)
    found = probe(files)
    files.close()
    session = client.create(smollm2_path)
    client.ask(session, max_tokens=2)
    taken = pss_bytes(daemon.model()["pid"])
    assert taken < found.weight_bytes + found.process_bytes < 2 * taken


def family(pid: int) -> list[int]:
    """The ids of a process and its descendants."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def pss_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):  # the process has ended
        (line,) = [x for x in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if x.startswith("Pss:")]
        return int(line.split()[1]) * 1024
    return 0
