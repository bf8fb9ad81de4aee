"""Mistakes on the command line are one line and an exit code, whatever the file or the number."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from kvloom.mistakes import problem_of
from kvloom.server.run import daemon
from tests.support.commands import run_cli, run_main
from tests.support.processes import CLI
from tests.tuning.test_simulate import make_times, save_times

LONG = "x" * 300  # longer than any file system allows
NAN_OPTIONS = [
    ("chat", "--temperature"),
    ("tune", "--lpot"),
    ("tune", "--max-gap"),
    ("tune", "--point-s"),
    ("simulate", "trace.jsonl", "--max-gap-ms"),
    ("simulate", "trace.jsonl", "--fleet", "--pool-gb-s"),
    ("fleet", "run", "--cpus"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a trace, step times and a plain file."""
    monkeypatch.chdir(tmp_path)
    arrival = {"arrival_s": 0, "prompt_tokens": 4, "output_tokens": 2}
    Path("trace.jsonl").write_text(json.dumps(arrival) + "\n")
    Path("file").touch()
    save_times(make_times(), Path("times.json"))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("cert", "dev", "file"), "file/tools/pmt/master: Not a directory"),
        (("chat", "--url", "http://[::1"), "--url 'http://[::1' is no URL: Invalid port: ':1'"),
        (("pull", LONG), f"{LONG}: File name too long"),
        (("serve", LONG, "--port", "0"), f"{LONG}/model_index.json: File name too long"),
        (("simulate", "trace.jsonl", "--backend", "fake", "--times", "file/times"), "file/times: Not a directory"),
        (
            ("serve", "--backend", "mock", "--log-level", "loud"),
            '"Verbose", "Info", "Warning", "Error", "None", got "loud"',
        ),
    ],
    ids=["cert", "chat", "pull", "serve", "simulate", "log level"],
)
def test_a_file_or_a_word_that_cannot_be_is_one_line(folder, arguments, told):
    ended = run_cli(*arguments)
    *_, last = ended.stderr.splitlines()
    assert (ended.returncode, last.startswith("kvloom: "), last.endswith(told)) == (1, True, True)
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--config", "deep.json"),
        ("config", "check", "deep.json"),
        ("fleet", "check", "deep.json"),
        ("simulate", "deep.json"),
        ("simulate", "trace.jsonl", "--times", "deep.json"),
        ("dataset", "deep.jsonl", "--model", "model"),
        ("serve", "model", "--port", "0"),
        ("pool", "credentials", "deep.json", "--access-id", "a"),
    ],
    ids=" ".join,
)
def test_a_file_that_is_nested_too_deeply_is_one_line(folder, arguments):
    deep = "[" * 100_000 + "]" * 100_000
    model = folder / "model"
    model.mkdir()
    for file in (folder / "deep.json", folder / "deep.jsonl", model / "config.json", model / "tokenizer.json"):
        file.write_text(deep)
    (model / "model.safetensors").touch()
    ended = run_cli(*arguments)
    told = [line for line in ended.stderr.splitlines() if line != "loading model ..."]
    assert (ended.returncode, len(told)) == (1, 1), ended.stderr


WHOLE_FILES = [
    ("serve", "--backend", "fake", "--config"),
    ("serve", "--backend", "fake", "--port", "0", "--api-key-file"),
    ("config", "check"),
    ("fleet", "check"),
    ("simulate",),
    ("simulate", "trace.jsonl", "--times"),
    ("pool", "agent", "--secret-file"),
    ("pool", "agent", "--secret-file", "secret", "--credentials"),
    ("pool", "credentials", "--access-id", "a"),
    ("pool", "control", "--secret-file"),
    ("pool", "control", "--secret-file", "secret", "--admin-token-file"),
    ("pool", "doctor", "--access-id", "a", "--access-key-file"),
]


@pytest.mark.parametrize("arguments", WHOLE_FILES, ids=" ".join)
def test_a_pipe_to_which_nobody_writes_is_not_waited_for(folder, arguments):
    os.mkfifo("pipe.jsonl")
    Path("secret").write_text("x" * 40)
    ended = run_cli(*arguments, "pipe.jsonl")
    assert (ended.returncode, len(ended.stderr.splitlines())) == (1, 1), ended.stderr
    assert "it is a pipe to which nobody writes" in ended.stderr
    assert arguments[0] != "pool" or ended.stderr.endswith(": pipe.jsonl: it is a pipe to which nobody writes\n")


def test_what_a_command_writes_is_a_file(folder):
    """As with bash's process substitution: kvloom config check <(command)."""
    reading, writing = os.pipe()
    with open(writing, "w") as pipe:
        pipe.write('{"no": "config"}')
    ended = run_cli("config", "check", f"/dev/fd/{reading}")
    os.close(reading)
    assert "\nno: is not known; known are " in ended.stderr


def test_a_file_without_an_end_is_larger_than_it_may_be(folder):
    ended = run_cli("fleet", "check", "/dev/zero")
    assert ended.stderr == "kvloom: /dev/zero: cannot be read: it is larger than 10485760 bytes\n"


def test_rows_without_an_end_are_not_read_for_ever(folder):
    ended = run_cli("tune", "--backend", "mock", "--data", "/dev/zero", "--output", "tuned")
    assert ended.stderr.endswith("kvloom: /dev/zero: cannot be read: it is larger than 268435456 bytes\n")


def test_a_file_that_cannot_be_is_one_line_of_the_daemon_too(folder):
    ended = run_main(daemon.main, "--config", LONG)
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (IsADirectoryError(21, "Is a directory", b"d"), "d: Is a directory"),
        (ConnectionResetError(104, "Connection reset by peer"), None),
        (TimeoutError(), None),
        (ValueError("x"), None),
    ],
)
def test_what_is_told_of_an_error(error, told):
    """An error that names no file and no full disk is a bug of kvloom and keeps its traceback."""
    assert problem_of(error) == told


@pytest.mark.parametrize(
    ("encoding", "arguments", "told"),
    [
        ("ascii", ("serve", "--help"), b"--weight-cache"),
        ("latin-1", ("fleet", "check", "\N{SNOWMAN}.yaml"), b"\\u2603.yaml is right\n"),
        ("utf-8", ("fleet", "check", os.fsdecode(b"\xff.yaml")), b"\\udcff.yaml is right\n"),
        ("utf-8:surrogateescape", ("fleet", "check", os.fsdecode(b"\xff.yaml")), b"\xff.yaml is right\n"),
    ],
)
def test_what_a_terminal_cannot_show_is_written_otherwise(folder, encoding, arguments, told):
    Path(arguments[-1]).write_text("applications: [{import_path: 'kvloom.fleet.app:build', args: {backend: fake}}]")
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    ended = subprocess.run([*CLI, *arguments], env=environment, capture_output=True, check=True)
    assert told in ended.stdout


@pytest.mark.parametrize("option", NAN_OPTIONS, ids=" ".join)
@pytest.mark.parametrize("number", ["nan", "inf"])
def test_what_is_no_finite_number_is_refused_before_anything_begins(folder, option, number):
    ended = run_cli(*option, number)
    assert ended.returncode == 2
    assert option[-1] in ended.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--backend", "fake", "--api-key-file", "none"),
        ("dataset", "none.jsonl"),
        ("tune", "--data", "none"),
        ("simulate", "none"),
    ],
    ids=" ".join,
)
def test_a_file_that_is_not_there_is_told_without_numbers(folder, arguments):
    ended = run_cli(*arguments)
    assert ended.returncode == 1
    assert ended.stderr.count(arguments[-1]) == 1
    assert ended.stderr.endswith(" cannot be read: No such file or directory\n")


def test_a_folder_is_no_file_of_step_times(folder):
    ended = run_cli("simulate", "trace.jsonl", "--backend", "fake", "--times", ".")
    assert ended.stderr == "kvloom: .: cannot be read as step times: Is a directory\n"


def test_an_array_is_told_how_it_becomes_a_trace(folder):
    Path("array.json").write_text('\n[{"arrival_s": 0, "prompt_tokens": 4, "output_tokens": 2}]')
    ended = run_cli("simulate", "array.json")
    assert ended.returncode == 1
    assert ended.stderr == ("kvloom: array.json, line 2: is an array: a trace is one object a line (jq -c '.[]')\n")


@pytest.mark.parametrize(
    ("option", "most"), [("--max-seq-len", 2**31 - 1), ("--max-batch", 5000), ("--speculate", 64)], ids=str
)
def test_a_number_that_no_message_holds_is_refused_by_name(folder, option, most):
    ended = run_cli("serve", "--backend", "fake", "--port", "0", option, f"{10**23}")
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stderr.startswith(f"kvloom: {option}: must be between ")
    assert f" and {most}, got 1000" in ended.stderr


@pytest.mark.parametrize("option", ["--num-blocks", "--num-host-blocks", "--replicas", "--prefill", "--max-replicas"])
def test_a_simulation_of_more_than_memory_holds_is_refused(folder, option):
    assert run_cli("simulate", "trace.jsonl", "--times", "times.json", option, f"{10**12}").returncode == 2
