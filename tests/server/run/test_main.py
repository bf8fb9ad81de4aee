"""`kvloom serve` as a process: starting, stopping, wrong arguments, and a model process that is killed."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest

from kvloom.contract.config import EngineConfig
from kvloom.server.config.settings import ServerConfig
from kvloom.server.run import loading
from kvloom.server.run.compose import first_request
from kvloom.server.serving.card import ModelCard
from tests.support.commands import run_cli
from tests.support.ports import free_port
from tests.support.processes import CLI, serve, serving
from tests.support.waiting import WAIT_S, until

MOCK = ("--backend", "fake")
BODY = {"model": "mock", "prompt": "hi", "ignore_eos": True}


def mock_config(folder: Path, **model: object) -> Path:
    """A config.json of the documented layout that serves the mock model."""
    path = folder / "config.json"
    document = {
        "OtherParam": {
            "ResourceParam": {"cacheBlockSize": 128, "preAllocBlocks": 4},
            "LogParam": {"logLevel": "Info", "logPath": "/logs/mindservice.log"},
            "ServeParam": {"ipAddress": "127.0.0.1", "port": 1025, "maxLinkNum": 300, "httpsEnabled": False},
        },
        "WorkFlowParam": {
            "TemplateParam": {"templateType": "Standard", "templateName": "Standard_llama", "pipelineNumber": 1}
        },
        "ModelDeployParam": {
            "maxSeqLen": 2560,
            "npuDeviceIds": [[0]],
            "ModelParam": [
                {
                    "modelInstanceType": "StandardMock",
                    "modelName": "llama_65b",
                    "worldSize": 1,
                    "cpuMemSize": 0,
                    "npuMemSize": -1,
                    "backendType": "atb",
                    **model,
                }
            ],
        },
        "ScheduleParam": {
            "maxPrefillBatchSize": 50,
            "maxPrefillTokens": 8192,
            "prefillTimeMsPerReq": 150,
            "prefillPolicyType": 0,
            "decodeTimeMsPerReq": 50,
            "decodePolicyType": 0,
            "maxBatchSize": 200,
            "maxIterTimes": 2550,
            "maxPreemptCount": 0,
            "supportSelectBatch": False,
            "maxQueueDelayMicroseconds": 5000,
        },
    }
    path.write_text(json.dumps(document))
    path.chmod(0o640)
    return path


@pytest.mark.usefixtures("really_started")
def test_it_says_that_it_is_ready_and_prints_a_curl_line_that_works():
    with serve(*MOCK) as server:
        assert "Daemon start success!" in server.lines
        until(lambda: any("curl " in line for line in server.lines))
        line = next(line.strip() for line in server.lines if line.strip().startswith("curl "))
        answer = subprocess.run(["bash", "-c", line + " -s"], capture_output=True, text=True, check=True, timeout=120)
        assert json.loads(answer.stdout)["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_running_requests_finish_and_the_server_exits_0(number):
    reset = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); from kvloom.cli import main; main()"  # nohup
    command = [CLI[0], "-c", reset, "serve", *MOCK, "--grace", "20", "--port", "0"]
    with serving(command) as server:
        body = {**BODY, "max_tokens": 1500, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=120) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(number)
            until(lambda: httpx.get(server.url + "/health").status_code == 503)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert server.process.wait(timeout=120) == 0


START = """
import os, signal
from kvloom.cli import main
from kvloom.server.run import loading

class Loading(loading.Loading):
    def __init__(self, config):
        try:
            os.kill(os.getpid(), signal.{name})
        {swallowing}
        super().__init__(config)

loading.Loading = Loading
main()
"""


@pytest.mark.parametrize("swallowing", ["except: pass", "finally: pass"], ids=["swallowed", "raised"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_in_the_middle_of_a_start_ends_it_and_leaves_nothing_behind(name, swallowing, tmp_path):
    """Some libraries import optional modules with a bare `except`, and finalizers ignore every exception."""
    pid_file = tmp_path / "pid"
    code = START.format(name=name, swallowing=swallowing)
    command = [CLI[0], "-c", code, "serve", *MOCK, "--port", "0", "--pid-file", str(pid_file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert (ended.returncode, ended.stdout, ended.stderr.removeprefix("loading mock ...\n")) == (0, "", "")
    assert not pid_file.exists()


def test_sigterm_cuts_off_what_runs_longer_than_the_grace_and_says_so(tmp_path):
    with serve(*MOCK, "--grace", "0.01", "--config", str(mock_config(tmp_path))) as server:
        body = {**BODY, "model": "llama_65b", "max_tokens": 2500, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=120) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["message"] == "the server is stopping"
        assert server.process.wait(timeout=120) == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_second_signal_ends_what_runs_which_is_told_and_without_a_traceback(stream):
    with serve(*MOCK) as server, ThreadPoolExecutor(1) as pool:
        body = {**BODY, "max_tokens": 2000, "n": 128, "stream": stream}
        answer = pool.submit(httpx.post, server.url + "/v1/completions", json=body, timeout=120)
        until(lambda: re.search(r"\nnum_requests_running\S* [1-9]", httpx.get(server.url + "/metrics").text))
        server.process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(server.url + "/health").status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        assert "the server is stopping" in answer.result().text
        assert server.process.wait(timeout=WAIT_S) == 0
    assert not [line for line in server.lines if "Traceback" in line]


def test_a_server_without_standard_streams_serves():
    """Otherwise the next descriptors would get their numbers, and messages of libraries would go into a socket."""

    def answers() -> bool:
        with contextlib.suppress(httpx.TransportError):
            url = f"http://127.0.0.1:{port}/v1/completions"
            return httpx.post(url, json={**BODY, "max_tokens": 2}, timeout=WAIT_S).status_code == 200
        return False

    port = free_port()
    command = f"exec {' '.join(CLI)} serve {' '.join(MOCK)} --port {port} <&- >&- 2>&-"
    with subprocess.Popen(["bash", "-c", command]) as process:
        try:
            until(answers)
            assert os.readlink(f"/proc/{process.pid}/fd/2") == "/dev/null"
        finally:
            process.terminate()
    assert process.returncode == 0


def test_more_connections_than_the_soft_limit_of_descriptors_are_served():
    """They used to be closed without a message, above 1,024 of them on most systems."""
    command = f"ulimit -Sn 64; exec {' '.join(CLI)} serve {' '.join(MOCK)} --port 0"
    with serving(["bash", "-c", command]) as server, contextlib.ExitStack() as stack:
        url = httpx.URL(server.url)
        callers = [stack.enter_context(socket.create_connection((url.host, url.port))) for _ in range(100)]
        for caller in callers:
            caller.settimeout(WAIT_S)
            caller.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert {caller.recv(12) for caller in callers} == {b"HTTP/1.1 200"}


def test_a_service_manager_that_signals_every_process_loses_no_answer():
    with serve(*MOCK, "--grace", "20") as server:
        body = {**BODY, "max_tokens": 1500, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(server.rank_pid(), signal.SIGSTOP)
            children = psutil.Process(server.process.pid).children(recursive=True)
            for number in (server.process.pid, *(child.pid for child in children)):
                os.kill(number, signal.SIGTERM)
            os.kill(server.rank_pid(), signal.SIGCONT)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert server.process.wait(timeout=WAIT_S) == 0
    assert not [line for line in server.lines if "killed" in line]


def test_a_killed_model_process_is_a_pause_of_its_requests_and_the_server_stays():
    with serve(*MOCK) as server:
        body = {**BODY, "max_tokens": 1500, "temperature": 0.9, "seed": 3}
        whole = httpx.post(server.url + "/v1/completions", json=body, timeout=120).json()["choices"][0]
        with httpx.stream(
            "POST", server.url + "/v1/completions", json={**body, "stream": True}, timeout=120
        ) as response:
            lines = response.iter_lines()
            first = next(lines)
            os.kill(server.rank_pid(), signal.SIGKILL)
            *rest, done = [first, *(line for line in lines if line and not line.startswith(":"))]
        assert done == "data: [DONE]"
        choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in rest]
        assert "".join(choice["text"] for choice in choices) == whole["text"]
        assert choices[-1]["finish_reason"] == whole["finish_reason"]
        until(lambda: httpx.get(server.url + "/health").status_code == 200)
        answer = httpx.post(server.url + "/v1/completions", json={**BODY, "max_tokens": 3})
        assert answer.json()["usage"]["completion_tokens"] == 3


def test_the_model_process_ends_with_a_server_that_is_killed():
    with serve(*MOCK) as server:
        rank = server.rank_pid()
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        until(lambda: not Path(f"/proc/{rank}/cmdline").exists() or not Path(f"/proc/{rank}/cmdline").read_bytes())


def test_a_server_that_ends_leaves_the_pid_file_that_another_one_has_written(tmp_path):
    pid_file = tmp_path / "pid"
    with serve(*MOCK, "--pid-file", str(pid_file)) as first:
        with serve(*MOCK, "--pid-file", str(pid_file)) as second:
            first.stop()
            assert pid_file.read_text() == f"{second.process.pid}\n"
            second.stop()
        assert not pid_file.exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_that_is_killed_leaves_nothing_in_the_folder_of_temporary_files(tmp_path, ranks):
    config = mock_config(tmp_path, worldSize=ranks)
    document = json.loads(config.read_text())
    document["ModelDeployParam"]["npuDeviceIds"] = [list(range(ranks))]
    config.write_text(json.dumps(document))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with serving([*CLI, "serve", "--port", "0", "--config", str(config)], TMPDIR=str(temporary)) as server:
        body = {**BODY, "model": "llama_65b", "max_tokens": 3}
        assert httpx.post(server.url + "/v1/completions", json=body).is_success
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    assert list(temporary.iterdir()) == []


def test_a_config_file_is_served_and_flags_override_it(tmp_path):
    with serve("--config", str(mock_config(tmp_path)), "--served-model-name", "mine") as server:
        card = httpx.get(server.url + "/v1/models").json()["data"][0]
        assert (card["id"], card["max_model_len"]) == ("mine", 2560)


def run_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *arguments], capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "nowhere"], "'nowhere' is neither a folder, a .gguf file nor a known model; known are smollm2"),
        (
            ["serve", "--backend", "tpu", "--port", "0", "/etc/hostname"],
            "backend: must name a back end that is installed (default, auto, cpu, torch, reference, mock, fake, vllm; ",
        ),
        (["serve", "--backend", "fake", "--port", "99999"], "port: must be between 0 and 65535"),
        (["serve", "--backend", "fake", "--grace", "-1"], "grace: must be between 0 and 86400 s, got -1.0"),
        (["serve", "--backend", "fake", "--grace", "nan"], "grace: must be between 0 and 86400 s, got nan"),
        (["serve", "--backend", "fake", "--max-batch", "0"], "--max-batch: must be between 1 and 5000, got 0"),
        (["serve", "--backend", "fake", "--max-batch", "5001"], "--max-batch: must be between 1 and 5000, got 5001"),
        (["serve", "--backend", "fake", "--speculate", "65"], "--speculate: must be between -1 and 64, got 65"),
        (
            ["serve", "--backend", "fake", "--stream-interval", "0"],
            "--stream-interval: must be between 1 and 1000, got 0",
        ),
        (["serve", "--backend", "fake", "--max-gap-ms", "-0.5"], "--max-gap-ms: must be -1 or 0 ms and more, got -0.5"),
        (["serve", "--backend", "fake", "--max-gap-ms", "nan"], "--max-gap-ms: must be a finite number, got nan"),
        (
            ["serve", "--backend", "fake", "--kv-dtype", "x" * 9999],
            f'must be one of "auto", "bf16", "int8", got "{"x" * 99}...',
        ),
        *(
            (
                ["serve", "--backend", "fake", "--served-model-name", name],
                "--served-model-name: must be 1 to 256 letters, digits, '-'",
            )
            for name in ("", "x" * 257, "a\nb", "a b", "/a")
        ),
        (
            ["serve", "--backend", "fake", "--image-model", "a b=/tmp"],
            "--image-model: must be 1 to 256 letters, digits, '-'",
        ),
        (
            ["serve", "--backend", "fake", "--port", "0", "--pid-file", "/dev/zero"],
            "pid-file: /dev/zero is no plain file",
        ),
        (["serve", "--config", "/nowhere.json"], "/nowhere.json: cannot be read: No such file or directory"),
        (
            ["pull", "gpt-9"],
            "no model is named 'gpt-9'; known are smollm2, gemma3-270m, qwen2.5-coder-1.5b, or the path of a model",
        ),
        (["pull", "https://example.org/a.gguf"], "is a URL, and nothing here verifies what it gives"),
        (["pull", "/etc/hostname"], "/etc/hostname: "),
        (["pull", "Qwen/Qwen2.5-0.5B-Instruct"], "`hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir Qwen2.5-0.5B"),
        (["run", "smollm2"], "there is no command run: `kvloom serve MODEL` serves a model; `kvloom chat`, in another"),
        (["ps"], "there is no command ps: `kvloom doctor` says what"),
        (["chat", "--url", "http://127.0.0.1:9"], "does not list its models: Connection refused; is it running?"),
    ],
)
def test_a_users_mistake_is_one_line_that_says_what_to_do(arguments, words):
    result = run_cli(*arguments)
    assert result.returncode == 1
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_context_that_the_model_lacks_is_lowered_and_told(monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr(loading, "factory_of", lambda name: lambda *arguments: SimpleNamespace(max_seq_len=8192))
    card = ModelCard("m", EngineConfig(backend="fake", max_seq_len=100_000))
    loading.Loading(ServerConfig((card,))).models.result(WAIT_S)
    assert "maxSeqLen: 100000 is lowered to 8192, the longest context of m" in caplog.text


def test_a_port_in_use_is_one_line_before_anything_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = run_process("serve", "--backend", "fake", "--port", str(taken.getsockname()[1]))
    assert result.returncode == 1
    assert "is in use by another program; stop that one or choose another port" in result.stderr


def test_a_file_that_is_no_model_is_one_line(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    result = run_process("serve", "--port", "0", str(path))
    assert result.returncode == 1
    assert "damaged or cut short" in result.stderr


def test_the_version_is_printed():
    assert run_cli("--version").stdout.startswith("kvloom 0.")


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.usefixtures("really_started")
def test_memory_returns_to_its_level_after_many_large_bad_bodies():
    bodies = (b'{"a":' * 200_000, b"[" * 1_000_000, b'{"model": "mock", "prompt": "' + b"x" * 1_000_000 + b'"}')
    with serve(*MOCK) as server, httpx.Client(base_url=server.url, timeout=120) as client:

        def send(rounds: int) -> None:
            for i in range(rounds):
                assert client.post("/v1/completions", content=bodies[i % 3]).status_code == 400

        send(30)
        before = resident_bytes(server.process.pid)
        send(150)
        assert resident_bytes(server.process.pid) < before + 32 * 2**20


@pytest.mark.parametrize(
    ("lacks", "labels", "path"),
    [
        ({}, [], "chat/completions"),
        ({"generation": "it makes embeddings"}, [], "embeddings"),
        ({"generation": "it labels texts"}, ["good", "bad"], "classify"),
    ],
)
def test_what_a_start_proposes_is_what_the_model_answers(lacks, labels, path):
    engine = SimpleNamespace(info=SimpleNamespace(lacks=lacks, labels=labels))
    assert first_request(loading.Loaded([(ModelCard("m", EngineConfig(backend="fake")), engine, None)]))[0] == path
