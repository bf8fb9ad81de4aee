"""`mindieservice_daemon` and `kvloom config` as processes: the output, files and signals that deployments rely on."""

import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvloom.contract.config import EngineConfig
from kvloom.server.config.keys import LAYOUT_1
from kvloom.server.run import preflight
from kvloom.server.run.config_cli import starting_point
from kvloom.server.run.daemon import main as daemon_main
from kvloom.server.run.launch import read_settings
from kvloom.server.secure.api_keys import hash_key, new_key
from tests.support.commands import run_cli, run_main
from tests.support.ports import free_port
from tests.support.processes import serving
from tests.support.waiting import until

DAEMON = (sys.executable, "-m", "kvloom.server.run.daemon")


def install(folder: Path, names: tuple[str, ...] = ("llama_65b",), **serve: Any) -> Path:
    """Creates an install folder whose conf/config.json serves mock models. Returns the file."""
    text = "\n".join(line for line in starting_point().splitlines() if "//" not in line)
    document = json.loads(text)
    document["OtherParam"]["ServeParam"] |= {"port": free_port(), **serve}
    model = document["ModelDeployParam"]["ModelParam"][0] | {"modelInstanceType": "StandardMock"}
    document["ModelDeployParam"]["ModelParam"] = [{**model, "modelName": name} for name in names]
    path = folder / "conf" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(document))
    path.chmod(0o640)
    return path


def generate(url: str, model: str, **parameters: Any) -> dict[str, Any]:
    body = {"id": "r1", "text_input": "hi", "parameters": parameters}
    answer: dict[str, Any] = httpx.post(f"{url}/v2/models/{model}/generate", json=body).raise_for_status().json()
    return answer


@pytest.mark.usefixtures("really_started")
def test_it_says_the_line_that_deployers_wait_for_and_logs_to_its_file(tmp_path):
    config, pid_file = install(tmp_path, ("llama_65b", "baichuan")), tmp_path / "daemon.pid"
    with serving([*DAEMON, "--config", str(config), "--pid-file", str(pid_file)]) as daemon:
        assert daemon.lines[:3] == ["loading llama_65b ...", "loading baichuan ...", "Daemon start success!"]
        assert pid_file.read_text() == f"{daemon.process.pid}\n"
        names = [card["id"] for card in httpx.get(daemon.url + "/v1/models").json()["data"]]
        assert names == ["llama_65b", "baichuan"]
        for name in names:
            assert generate(daemon.url, name)["model_name"] == name
        httpx.post(daemon.url + "/generate", json={}, headers={"X-Request-Id": "mine-7"})
        log = tmp_path / "logs" / "mindservice.log"
        until(lambda: log.read_text().count("COMPLETED REQ ID: r1 ,") == 2)
        assert (
            "[mine-7] kvloom.server.http.app: POST /generate: `inputs` or `prompt` must be necessary" in log.read_text()
        )
        assert log.stat().st_mode & 0o777 == 0o640
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(timeout=120) == 0
    assert not pid_file.exists()
    assert not any("COMPLETED" in line for line in daemon.lines)


def test_the_install_folder_is_where_the_environment_says(tmp_path):
    install(tmp_path)
    with serving(DAEMON, MIES_INSTALL_PATH=str(tmp_path), MIES_PYTHON_LOG_TO_STDOUT="1") as daemon:
        generate(daemon.url, "llama_65b")
        until(lambda: any("COMPLETED REQ ID: r1 ," in line for line in daemon.lines))


def test_status_routes_move_to_the_management_port(tmp_path):
    management = free_port()
    with serving([*DAEMON, "--config", str(install(tmp_path, managementPort=management))]) as daemon:
        other = f"http://127.0.0.1:{management}"
        assert httpx.get(other + "/health").status_code == 200
        assert httpx.get(other + "/v2/models/llama_65b/getSlotCount").json()["total_slots"] == 200
        assert httpx.get(daemon.url + "/health").status_code == 404
        assert generate(daemon.url, "llama_65b")["id"] == "r1"
        refused = httpx.post(f"{other}/generate", json={"inputs": "hi"})
        assert (refused.status_code, refused.json()["error"]) == (404, "there is no route /generate on this port")


def test_metrics_move_to_their_own_port(tmp_path):
    management, metrics = free_port(), free_port()
    config = install(tmp_path, managementPort=management, metricsPort=metrics)
    with serving([*DAEMON, "--config", str(config)]) as daemon:
        bases = [daemon.url, f"http://127.0.0.1:{management}", f"http://127.0.0.1:{metrics}"]
        found = [[httpx.get(base + path).status_code for base in bases] for path in ("/metrics", "/health", "/console")]
        assert found == [[404, 404, 200], [404, 200, 404], [200, 200, 404]]
        assert generate(daemon.url, "llama_65b")["id"] == "r1"
        assert "request_success_total" in httpx.get(bases[2] + "/metrics").text


def test_metrics_alone_have_a_port(tmp_path):
    metrics = free_port()
    with serving([*DAEMON, "--config", str(install(tmp_path, metricsPort=metrics))]) as daemon:
        other = f"http://127.0.0.1:{metrics}"
        assert [httpx.get(base + "/metrics").status_code for base in (daemon.url, other)] == [404, 200]
        assert [httpx.get(base + "/health").status_code for base in (daemon.url, other)] == [200, 404]


def test_a_model_whose_name_is_a_route_is_refused(tmp_path):
    done = run_main(daemon_main, "--config", str(install(tmp_path, ("llama_65b", "x/ready"))))
    assert done.returncode == 1
    assert "modelName: 'x/ready' cannot be told from a route of /v2/models: it holds '/ready'" in done.stderr


def test_stop_service_answers_when_running_requests_have_ended_and_the_daemon_exits(tmp_path):
    with serving([*DAEMON, "--config", str(install(tmp_path))]) as daemon:
        body = {"text_input": "hi", "parameters": {"max_new_tokens": 500}}
        with httpx.stream("POST", f"{daemon.url}/v2/models/llama_65b/generate_stream", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            stopped: list[httpx.Response] = []
            stop = threading.Thread(target=lambda: stopped.append(httpx.post(daemon.url + "/stopService", timeout=120)))
            stop.start()
            last = [line for line in lines if line][-1]
        assert "error" not in json.loads(last.removeprefix("data:"))
        stop.join()
        assert stopped[0].status_code == 200
        assert daemon.process.wait(timeout=120) == 0


def test_prompts_and_keys_are_in_no_log_line(tmp_path):
    key, secret = new_key(), "the-secret-of-the-prompt"
    config = install(tmp_path, apiKeyFile="keys", maxInputChars=2000)
    (tmp_path / "keys").write_text(hash_key(key))
    with serving([*DAEMON, "--config", str(config)], MIES_PYTHON_LOG_TO_STDOUT="1") as daemon:
        headers = {"Authorization": f"Bearer {key}"}
        with httpx.Client(base_url=daemon.url, headers=headers) as client:
            chat = {"model": "llama_65b", "messages": [{"role": "user", "content": secret}]}
            assert client.post("/v1/chat/completions", json=chat).status_code == 200
            assert client.post("/generate", json={"inputs": secret}).status_code == 200
            assert client.post("/generate", json={"inputs": secret, "parameters": {"top_k": 0}}).status_code == 422
            assert client.post("/generate", json={"inputs": secret * 100}).status_code == 422
            assert client.post("/generate", content=secret).status_code == 422
            assert client.post("/v1/chat/completions", json={**chat, "top_p": secret}).status_code == 400
        assert httpx.post(daemon.url + "/generate", json={"inputs": secret}, headers={"X-Api-Key": key + "x"}).is_error
        log = tmp_path / "logs" / "mindservice.log"
        until(lambda: log.read_text().count("COMPLETED") == 2 and log.read_text().count("POST") == 4)
        written = log.read_text() + "\n".join(daemon.lines)
    assert secret not in written
    assert key not in written


def test_pages_of_other_origins_may_call_only_when_they_are_named(tmp_path):
    with serving([*DAEMON, "--config", str(install(tmp_path, corsOrigins=["https://a.example"]))]) as daemon:
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
        for origin, is_named in (("https://a.example", True), ("https://b.example", False)):
            preflight = httpx.options(daemon.url + "/v1/chat/completions", headers={"Origin": origin, **asked})
            assert (preflight.status_code == 200) is is_named
            answer = httpx.get(daemon.url + "/v1/models", headers={"Origin": origin})
            assert (answer.headers.get("access-control-allow-origin") == origin) is is_named


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"MIES_PYTHON_LOG_LEVEL": "LOUD"}, "MIES_PYTHON_LOG_LEVEL: must be one of FATAL, ERROR"),
        ({"MIES_CONTINUOUS_BATCHING": "yes"}, "MIES_CONTINUOUS_BATCHING: must be 0 or 1, got 'yes'"),
        ({"AIE_LLM_CONTINUOUS_BATCHING": "2"}, "AIE_LLM_CONTINUOUS_BATCHING: must be 0 or 1, got '2'"),
    ],
)
def test_a_wrong_variable_is_one_line_and_nothing_starts(tmp_path, monkeypatch, environment, words):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = run_main(daemon_main, "--config", str(install(tmp_path)))
    assert result.returncode == 1
    assert result.stderr.startswith(f"mindieservice_daemon: {words}")
    assert not (tmp_path / "logs").exists()


def test_config_check_and_init(tmp_path):
    path = tmp_path / "mine.json"
    assert run_cli("config", "init", str(path)).returncode == 0
    assert path.stat().st_mode & 0o777 == 0o640
    again = run_cli("config", "init", str(path))
    assert (again.returncode, again.stderr) == (
        1,
        f"kvloom: {path}: is there already; give another name, or --force\n",
    )
    right = run_cli("config", "check", str(path))
    assert (right.returncode, "smollm2 on http://127.0.0.1:1025" in right.stdout) == (0, True)
    path.write_text(path.read_text().replace('"maxLinkNum": 300', '"maxLinkNum": 0'))
    wrong = run_cli("config", "check", str(path))
    message = "kvloom: OtherParam.ServeParam.maxLinkNum: must be between 1 and 1000, got 0\n"
    assert (wrong.returncode, wrong.stderr) == (1, message)


def test_every_key_says_what_it_means():
    def keys(layout: Any) -> list[Any]:
        below = layout.values() if isinstance(layout, dict) else layout if isinstance(layout, list) else []
        return [layout] if not below else [key for item in below for key in keys(item)]

    assert all(key.meaning for key in keys(LAYOUT_1))


def test_config_check_counts_the_memory_of_the_models_before(tmp_path, monkeypatch):
    """Each model alone would fit; the second one is checked beside what the first one takes."""
    seen = []

    def check(name: str, config: EngineConfig) -> int:
        seen.append((name, config.promised_bytes, config.num_sharing))
        return 1000

    monkeypatch.setattr(preflight, "_check_model", check)
    settings = read_settings(install(tmp_path, ("a", "b", "c")), {})
    assert [str(problem) for problem in preflight.problems(settings)] == []
    assert seen == [("a", 0, 3), ("b", 1000, 2), ("c", 2000, 1)]
