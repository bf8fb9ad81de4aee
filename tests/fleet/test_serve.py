"""A fleet on a real Ray: all tests share one cluster, which `kvloom fleet run` starts and ends."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fleet.conftest import START_S, fleet_run
from tests.fleet.fleets import with_missing_adapter
from tests.fleet.mixed import Kill, answers, mixed, truth
from tests.support.processes import facts_of
from tests.support.waiting import until

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]
RAYS = os.environ | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
NUM_KILLS = int(os.environ.get("KVLOOM_FLEET_KILLS", "1"))


def test_it_answers_as_one_server_does_whole_and_streamed(fleet):
    expected = truth("hello", 3)
    assert fleet.complete("hello", seed=3)["choices"][0]["text"] == expected
    assert fleet.stream("hello", seed=3) == expected


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"model": "mock", "prompt": "hi", "max_tokens": -1}, 400),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}, 400),
        ("/generate", {"inputs": "hi", "parameters": {"max_new_tokens": 0}}, 422),
    ],
)
def test_bad_requests_are_refused_as_by_one_server(fleet, path, body, status):
    assert httpx.post(fleet.url + path, json=body, timeout=120).status_code == status


def test_everything_listens_on_loopback(fleet):
    """Except the port of each of Serve's replicas, which Ray opens on all addresses and guards with its token."""
    processes = facts_of(fleet.process.pid, "name", "net_connections", "environ")
    listened = {
        c.laddr.ip
        for process in processes
        if not process["name"].startswith("ray::ServeRepl")
        for c in process["net_connections"] or ()
        if c.status == psutil.CONN_LISTEN
    }
    assert listened <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    rays = [process for process in processes if process["name"] in ("gcs_server", "raylet")]
    assert {process["environ"].get("RAY_AUTH_MODE") for process in rays} == {"token"}


def test_ray_starts_no_processes_that_one_machine_has_no_use_for(fleet):
    words = [word for process in facts_of(fleet.process.pid, "cmdline") for word in process["cmdline"] or ()]
    scripts = {Path(word).name for word in words if word.endswith(".py")}
    assert scripts.isdisjoint({"monitor.py", "log_monitor.py"})
    assert "dashboard.py" in scripts, "scripts are told by their names"


def test_a_chat_stays_where_its_prefix_is(fleet):
    fleet.wait_replicas(2)
    prompt, held = "a long prefix that fills some blocks " * 8, 0
    for turn in range(4):
        answer = fleet.complete(prompt, seed=turn, max_tokens=16)
        usage = answer["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        assert cached >= held // 16 * 16, "the other replica computed it"
        prompt, held = prompt + answer["choices"][0]["text"], usage["prompt_tokens"]


def test_metrics_sum_and_name_the_replicas(fleet):
    fleet.wait_replicas(2)
    fleet.complete("count me", seed=1, max_tokens=8)

    def families() -> dict:
        text = httpx.get(f"{fleet.url}/metrics", timeout=120).text
        return {family.name: family.samples for family in text_string_to_metric_families(text)}

    def is_told() -> bool:
        found = families()
        each = [sample.value for sample in found["replica_generation_tokens"] if sample.name.endswith("_total")]
        whole = found["generation_tokens"][0].value  # with what replicas had counted that other tests have killed
        return len(each) == 2 and 0 < sum(each) <= whole

    def is_named() -> bool:
        names = {sample.labels["replica"] for sample in families()["replica_ready"] if sample.value}
        return names == {each["name"] for each in fleet.replicas()}

    until(is_told)
    until(is_named)


@pytest.mark.parametrize("number", range(NUM_KILLS))
def test_a_replica_killed_at_any_moment_costs_no_token(fleet, number):
    draw = random.Random(number)
    for most in (250, 100, 30, 10, 3):  # in events; again, earlier, if the killed replica had no request left
        fleet.wait_replicas(2)
        moves, asks = fleet.feed()["moves"], mixed(f"kill {number} {most}", draw)
        kill = Kill(draw.choice(sorted(fleet.engine_pids())), at=draw.randrange(1, most))
        assert answers(fleet, asks, kill) == [ask.truth() for ask in asks]
        if fleet.feed()["moves"] > moves:
            break
    else:
        pytest.fail("no request was at the replica that was killed, five times")
    assert fleet.feed()["lost"] == 0


def test_a_replica_that_was_killed_is_replaced(fleet):
    fleet.wait_replicas(2)
    assert re.match(r"http://127\.0\.0\.1:\d+$", fleet.url)
    assert Path("/proc", str(fleet.process.pid)).exists()


def fleet_file(tmp_path, **args) -> str:
    """Write a fleet.yaml with these arguments; its path."""
    document = {
        "applications": [
            {
                "name": "fleet",
                "import_path": "kvloom.fleet.app:build",
                "args": {"backend": "fake", "cpusPerRank": 0.1, "patienceS": 20, **args},
            }
        ]
    }
    file = tmp_path / "fleet.yaml"
    file.write_text(json.dumps(document))
    return str(file)


def serve_run(fleet, tmp_path, **args) -> None:
    """`serve run fleet.yaml`, as Ray's users deploy, against the Ray that runs."""
    file = fleet_file(tmp_path, **args)
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "--non-blocking", "-a", fleet.ray_address, file]
    done = subprocess.run(command, env=RAYS, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr


class Load:
    """Threads that stream until the `with` block ends; every answer must be that of an undisturbed run."""

    def __init__(self, fleet, num_threads: int, repeat: int = 1) -> None:
        self._fleet, self._repeat = fleet, repeat
        self.is_over = threading.Event()
        self.num_done = 0
        self._pool = ThreadPoolExecutor(num_threads)
        self._futures = [self._pool.submit(self._run, number) for number in range(num_threads)]

    def _run(self, number: int) -> None:
        while not self.is_over.is_set():
            prompt = f"thread {number} request {self.num_done} " * self._repeat
            assert self._fleet.stream(prompt, seed=number) == truth(prompt, number)
            self.num_done += 1

    def __enter__(self) -> "Load":
        return self

    def __exit__(self, *error: object) -> None:
        self.is_over.set()
        for future in self._futures:
            future.result(timeout=START_S)
        self._pool.shutdown()


def test_its_replicas_have_the_priority_of_a_server(fleet):
    """Ray gives its workers the priority of a batch job."""
    assert {psutil.Process(pid).nice() for pid in fleet.engine_pids()} == {psutil.Process(fleet.process.pid).nice()}


def test_a_rolling_upgrade_by_serve_run_loses_no_request(fleet, tmp_path):
    before = fleet.engine_pids()
    with Load(fleet, 2) as load:
        serve_run(fleet, tmp_path, replicas=2, mock={"stepMs": 30})
        until(lambda: len(fleet.engine_pids()) == 2 and not fleet.engine_pids() & before, START_S)
        done = load.num_done
        until(lambda: load.num_done > done + 4, START_S)


def status_line(fleet, of: str, part: str) -> str:
    """Wait for a line with `part` in the message of `of` in Serve's status; the last such line."""
    program = (
        "import ray, time; from ray import serve; "
        f"ray.init(address='{fleet.ray_address}', log_to_driver=False, logging_level='ERROR')\n"
        f"def message(): return serve.status().applications['fleet']{of}.message\n"
        f"while not (lines := [line for line in message().splitlines() if {part!r} in line]): time.sleep(0.1)\n"
        "print(lines[-1])"
    )
    done = subprocess.run([sys.executable, "-c", program], env=RAYS, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_wrong_file_is_told_in_one_line_by_serves_status_and_what_runs_goes_on(fleet, tmp_path):
    serve_run(fleet, tmp_path, replicas="two")
    assert status_line(fleet, "", "args.") == "args.replicas: expected `int | null`, got `str`"
    assert fleet.stream("hello", seed=3) == truth("hello", 3)


@pytest.mark.skipif("KVLOOM_FLEET_LONG" not in os.environ, reason="takes a minute; KVLOOM_FLEET_LONG=1 runs it")
def test_one_grows_to_three_under_load_and_shrinks_again_and_loses_no_request(fleet, tmp_path):
    scaling = {"minReplicas": 1, "maxReplicas": 3, "queuedTokensPerReplica": 200, "upDelayS": 0.5, "downDelayS": 3}
    mock = {"stepMs": 5, "tokenMs": 1}
    serve_run(fleet, tmp_path, autoscaling=scaling, mock=mock)
    until(lambda: len(fleet.engine_pids()) == 1, START_S)
    with Load(fleet, 8, repeat=30):
        until(lambda: len(fleet.engine_pids()) == 3, START_S)
    with Load(fleet, 1):
        until(lambda: len(fleet.engine_pids()) == 1, START_S)


def roles(fleet) -> Counter[str]:
    """How many replicas of each role are ready."""
    return Counter(each["role"] for each in fleet.replicas())


@pytest.mark.skipif("KVLOOM_FLEET_LONG" not in os.environ, reason="takes a minute; KVLOOM_FLEET_LONG=1 runs it")
def test_each_role_grows_and_shrinks_by_its_own_load_and_no_request_is_lost(tmp_path):
    delays = {"maxReplicas": 2, "upDelayS": 0.5, "downDelayS": 3}
    each = {"prefill": delays | {"queuedTokensPerReplica": 1000}, "decode": delays | {"requestsPerReplica": 6}}
    options = {"maxSeqLen": 4096, "kvPool": True, "kvPoolGb": 0.1, "mock": {"stepMs": 5, "tokenMs": 1}}
    file = fleet_file(tmp_path, roles={"threshold": 256} | each, **options)
    with fleet_run("--fleet", file) as fleet:
        until(lambda: roles(fleet) == {"prefill": 1, "decode": 1}, START_S)
        with Load(fleet, 12):  # short prompts: no prefill replica computes them
            until(lambda: roles(fleet)["decode"] == 2, START_S)
            assert roles(fleet)["prefill"] == 1
        with Load(fleet, 12, repeat=60):
            until(lambda: roles(fleet)["prefill"] == 2, START_S)
        with Load(fleet, 1):
            until(lambda: roles(fleet) == {"prefill": 1, "decode": 1}, START_S)


@pytest.mark.skipif("KVLOOM_FLEET_LONG" not in os.environ, reason="takes a minute; KVLOOM_FLEET_LONG=1 runs it")
def test_a_replica_whose_files_have_changed_meanwhile_is_refused_by_name(tmp_path, tiny_path):
    path = tmp_path / "model.gguf"
    shutil.copy(tiny_path, path)
    file = fleet_file(tmp_path, model=str(path), name="tiny", backend="auto", replicas=2)
    with fleet_run("--fleet", file, backend="auto") as fleet:
        fleet.wait_replicas(2)
        with path.open("ab") as model:
            model.write(bytes(64))  # as if another version had been copied over it
        os.kill(min(fleet.engine_pids()), signal.SIGKILL)
        size = tiny_path.stat().st_size
        wanted = rf"node \w+ holds the model as .*model\.gguf:{size + 64}, and node \w+ of .*:{size}; give both"
        assert re.search(wanted, status_line(fleet, ".deployments['engines']", "of the same fleet as"))
        assert fleet.complete("hello", model="tiny", seed=3)["choices"][0]["text"]
        assert len(fleet.replicas()) == 1


@pytest.mark.skipif("KVLOOM_FLEET_LONG" not in os.environ, reason="takes a minute; KVLOOM_FLEET_LONG=1 runs it")
def test_a_replica_that_hangs_is_ended_and_its_requests_go_on_elsewhere(tmp_path):
    with fleet_run("--fleet", fleet_file(tmp_path, replicas=2, patienceS=60, mock={"stepMs": 20})) as fleet:
        fleet.wait_replicas(2)
        with Load(fleet, 8) as load:
            until(lambda: load.num_done > 8, START_S)
            hangs = min(fleet.engine_pids())
            os.kill(hangs, signal.SIGSTOP)
            until(lambda: hangs not in fleet.engine_pids() and len(fleet.engine_pids()) == 2, 60)


def run_in_vain(*options: str) -> str:
    """The last line of a `kvloom fleet run` that fails to start."""
    command = [sys.executable, "-m", "kvloom", "fleet", "run", "--backend", "fake", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.skipif("KVLOOM_FLEET_LONG" not in os.environ, reason="starts a Ray; KVLOOM_FLEET_LONG=1 runs it")
def test_a_replica_that_never_starts_is_told_in_one_line(tmp_path):
    said = run_in_vain("--port", "0", "--config", str(with_missing_adapter(tmp_path)))
    assert said.startswith("kvloom: a replica does not start: loraModules: a=/nowhere: ")
