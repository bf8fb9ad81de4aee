"""The examples run, the command line answers, and the daemon takes a socket from its starter."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvloom.gewu import Code, Refused, Session
from kvloom.gewu.protocol.frames import Frame, encode
from kvloom.gewu.service.settings import find_service
from kvloom.gewu.status import ask_status
from tests.support.gewu.daemons import compile_c, has_nlohmann, make_model, run_program
from tests.support.gewu.service import Peer, Service
from tests.support.waiting import until

EXAMPLES = Path(__file__).parents[2] / "examples" / "gewu"
ANSWER = "LLM is a model.\nIt predicts tokens."


def run_cli(daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvloom.gewu", *arguments]
    return subprocess.run(command, env=daemon.environ, capture_output=True, text=True, check=False)


def test_chat_in_c(daemon, model, tmp_path):
    program = compile_c(EXAMPLES / "chat.c")
    command = [str(program), str(model)]
    done = subprocess.run(command, env=daemon.environ, input="hi\nho\n", capture_output=True, text=True, check=True)
    assert done.stdout == f"{ANSWER}\n{ANSWER}\n"


@pytest.mark.skipif(not has_nlohmann(), reason="needs g++ and nlohmann/json.hpp (Debian: nlohmann-json3-dev)")
def test_the_first_line_in_cpp(daemon, model, tmp_path):
    program = compile_c(EXAMPLES / "first_line.cpp", "-std=c++11", compiler="c++")
    assert run_program(program, daemon, str(model), "hi") == "LLM is a model.\n"


def test_the_command_line(daemon, model):
    assert run_cli(daemon, "run", str(model), "hi").stdout == f"{ANSWER}\n"
    found = json.loads(run_cli(daemon, "status", "--json").stdout)
    assert found["pid"] == daemon.process.pid
    assert "model   " in run_cli(daemon, "status").stdout
    refused = run_cli(daemon, "run", "/nowhere", "hi")
    assert (refused.returncode, refused.stderr) == (1, "gewu: /nowhere: No such file or directory (INVAL)\n")


def test_without_a_daemon(daemon, tmp_path):
    environ = {**daemon.environ, "GEWU_SOCKET": str(tmp_path / "none")}
    for arguments, code in ((("run", "/tmp", "hi"), " (NOSYS)"), (("status",), "")):
        command = [sys.executable, "-m", "kvloom.gewu", *arguments]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        why = "(No such file or directory): start it with `kvloom gewu daemon`"
        assert done.returncode == 1
        assert done.stderr == f"gewu: no service answers on {tmp_path}/none {why}{code}\n"


def test_a_daemon_that_cannot_start_says_what_to_set(daemon):
    wrong = {"GEWU_SOCKET": "/proc/x/gewu.sock"}, {"GEWU_MEM_BUDGET": "lots"}, {"GEWU_MEM_BUDGET": "0"}
    said = []
    for environ in wrong:
        command = [sys.executable, "-m", "kvloom.gewu", "daemon"]
        done = subprocess.run(command, env=daemon.environ | environ, capture_output=True, text=True, check=False)
        said.append((done.returncode, done.stderr))
    why = "cannot listen there (No such file or directory): set GEWU_SOCKET to a path of yours"
    assert said[0] == (1, f"gewu: /proc/x/gewu.sock: {why}\n")
    assert said[1] == (1, "gewu: GEWU_MEM_BUDGET: must be bytes, 1 at least, or like 512M or 2G, got 'lots'\n")
    assert said[2] == (1, "gewu: GEWU_MEM_BUDGET: must be bytes, 1 at least, or like 512M or 2G, got '0'\n")


def test_a_socket_whose_path_is_too_long_is_to_be_named_shorter(daemon, tmp_path):
    path = tmp_path / ("s" * 108)
    for arguments, code in ((("run", "/tmp", "hi"), " (NOSYS)"), (("status",), "")):
        command = [sys.executable, "-m", "kvloom.gewu", *arguments]
        environ = {**daemon.environ, "GEWU_SOCKET": str(path)}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        why = "is longer than the 107 bytes of a socket's path: set GEWU_SOCKET to a shorter one"
        assert (done.returncode, done.stderr) == (1, f"gewu: {path} {why}{code}\n")


def test_a_prompt_that_is_not_utf_8_is_refused_in_a_line(daemon, model):
    refused = run_cli(daemon, "run", str(model), "\udcff")
    assert (refused.returncode, refused.stderr) == (1, r"gewu: '\udcff' is not UTF-8 (INVAL)" + "\n")


@pytest.mark.parametrize("answer", [Frame("r", 1, Code.FAULT, payload=b"the log says more"), Frame("Q", 1)])
def test_a_status_that_is_none_is_said_in_a_line(answer, daemon, tmp_path):
    """Of a daemon that fails, and of a program that sends back what it gets."""

    def script(peer: Peer) -> None:
        peer.greet()
        peer.expect("Q")
        peer.sock.sendall(encode(answer))

    service = Service(tmp_path / "gewu.sock", script)
    found = subprocess.run(
        [sys.executable, "-m", "kvloom.gewu", "status"],
        env=daemon.environ | service.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    service.join()
    service.close()
    why = answer.payload.decode() or "it does not speak Gewu's protocol"
    assert found.returncode == 1
    said = f"gewu: no service answers on {tmp_path}/gewu.sock ({why}): start it with `kvloom gewu daemon`\n"
    assert found.stderr == said


def test_what_is_no_model_is_named(daemon, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    refused = run_cli(daemon, "run", str(tmp_path), "hi")
    assert refused.stderr == f"gewu: {tmp_path} holds no .safetensors or .gguf file (INVAL)\n"
    huge = make_model(tmp_path / "huge", 1 << 42)
    assert "`kvloom gewu status` shows the budget" in run_cli(daemon, "run", str(huge), "hi").stderr


def test_the_library_says_why_when_asked_to(daemon, model, tmp_path):
    program = compile_c(EXAMPLES / "chat.c")

    def stderr_of(path: object, **environ: str) -> str:
        command, environ = [str(program), str(path)], {**daemon.environ, **environ}
        return subprocess.run(command, env=environ, capture_output=True, text=True, input="", check=False).stderr

    assert "libqos" not in stderr_of("/nowhere")
    assert "libqos: refused with 401: /nowhere: No such file or directory\n" in stderr_of("/nowhere", GEWU_LOG="1")
    lost = stderr_of(model, GEWU_LOG="1", GEWU_SOCKET=str(tmp_path / "none"))
    assert f"libqos: no service answers on {tmp_path}/none (No such file or directory): start it with" in lost


def test_a_client_finds_the_service_where_the_library_does(tmp_path):
    own, system = tmp_path / "gewu.sock", Path("/run/gewu/gewu.sock")
    assert find_service({"XDG_RUNTIME_DIR": str(tmp_path)}) == system
    own.touch()
    assert find_service({"XDG_RUNTIME_DIR": str(tmp_path)}) == own
    assert find_service({"XDG_RUNTIME_DIR": str(tmp_path), "GEWU_SOCKET": "/x"}) == Path("/x")
    assert find_service({}) == system


def test_the_python_binding(daemon, model, monkeypatch):
    monkeypatch.setenv("GEWU_SOCKET", str(daemon.socket))
    messages = [{"role": "user", "content": "hi"}]
    with Session(str(model), qos="user_interactive") as session:
        assert session.ask(messages) == ANSWER
        stream = session.stream(messages)
        assert next(stream) == "LLM "
        stream.close()  # aborts the request
        request = session.submit(messages, lambda reply: None)
        request.abort()
        with pytest.raises(Refused) as caught:
            request.abort()
        assert caught.value.code is Code.NOENT
        with pytest.raises(Refused) as caught:
            session.ask([])
        assert caught.value.code is Code.INVAL


def test_a_socket_from_systemd(daemon, model, tmp_path):
    path = tmp_path / "activated.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def pass_listener() -> None:
            os.dup2(listener.fileno(), 3)

        code = "import os; from kvloom.gewu.cli import app; os.environ['LISTEN_PID'] = str(os.getpid()); app()"
        command = [sys.executable, "-c", code, "daemon"]
        with subprocess.Popen(command, env=daemon.environ, preexec_fn=pass_listener, pass_fds=(3,)) as process:
            until(lambda: ask_status(path)["pid"] == process.pid)
            process.terminate()
    assert path.exists()
