"""Damaged and hostile model files: Create always returns a documented code, and other sessions go on."""

import asyncio
import ctypes
import json
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvloom.gewu.codes import Code, Refused
from kvloom.gewu.hosts.prober import Prober
from kvloom.gewu.modelfiles import open_files
from kvloom.gewu.prober.capabilities import only_those_of
from kvloom.gewu.protocol.frames import PROTOCOL, Frame, FrameDecoder, encode
from kvloom.gewu.service.system import _process_bytes
from kvloom.processes import kinds
from kvloom.processes.child import Child
from tests.gewu.test_probe import CONFIG, write_gguf
from tests.support.gewu.daemons import make_model
from tests.support.waiting import WAIT_S, until

MIB = 1 << 20


def folder_with(path: Path, config: str) -> Path:
    path.mkdir()
    (path / "config.json").write_text(config)
    (path / "model.safetensors").write_bytes(b"x")
    return path


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def pipe_inside(path: Path) -> Path:
    path.mkdir()
    os.mkfifo(path / "config.json")
    (path / "model.safetensors").write_bytes(b"x")
    return path


def loop(path: Path) -> Path:
    path.symlink_to(path)
    return path


def loop_inside(path: Path) -> Path:
    folder_with(path, "{}")
    (path / "model.gguf").symlink_to("model.gguf")
    return path


def sparse(path: Path) -> Path:
    """A header whose first value is an array of 48 million bytes."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 0, 48 * MIB)
    path.write_bytes(head)
    os.truncate(path, 64 * MIB)
    return path


def nested(path: Path) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9)
    path.write_bytes(head + struct.pack("<IQ", 9, 1) * 100_000)
    return path


def quantised(path: Path) -> Path:
    return folder_with(path, json.dumps({**CONFIG, "quantization_config": {"quant_method": "hqq"}}))


HOSTILE = {
    "2,000 brackets": (lambda path: folder_with(path, "[" * 2000), Code.INVAL),
    "a number of 400 digits": (
        lambda path: folder_with(path, json.dumps({**CONFIG, "vocab_size": 10**399})),
        Code.INVAL,
    ),
    "a number of 5,000 digits": (lambda path: folder_with(path, "1" * 5000), Code.INVAL),
    "15 MiB of brackets": (lambda path: folder_with(path, "[" + "[]," * (5 * MIB) + "0]"), Code.INVAL),
    "a billion layers": (
        lambda path: folder_with(path, json.dumps({**CONFIG, "num_hidden_layers": 1 << 30})),
        Code.INVAL,
    ),
    "quantised": (quantised, Code.NOSYS),
    "a rope of 400,000 characters": (
        lambda path: folder_with(path, json.dumps({**CONFIG, "rope_scaling": {"type": "r" * 400_000}})),
        Code.INVAL,
    ),
    "a pipe": (pipe, Code.INVAL),
    "a pipe inside": (pipe_inside, Code.INVAL),
    "a link to itself": (loop, Code.INVAL),
    "a link to itself inside": (loop_inside, Code.INVAL),
    "a sparse file": (sparse, Code.INVAL),
    "arrays in arrays": (nested, Code.INVAL),
    "a device": (lambda _: Path("/dev/zero"), Code.INVAL),
    "memory": (lambda _: Path("/proc/self/mem"), Code.INVAL),
    "the kernel's folder": (lambda _: Path("/proc/self/fd"), Code.INVAL),
}


@pytest.mark.parametrize(("make", "code"), HOSTILE.values(), ids=HOSTILE)
def test_create_answers_and_the_daemon_stays_as_it_is(make, code, daemon, client, model, tmp_path):
    session = client.create(model)
    before = _process_bytes(Path(f"/proc/{daemon.process.pid}"))
    path = make(tmp_path / "hostile")
    assert client.call("create", json.dumps({"model": str(path)})) == [code, 0xFFFFFFFF]
    assert _process_bytes(Path(f"/proc/{daemon.process.pid}")) - before < 8 * MIB
    assert client.ask(session)[-1]["finish_reason"] == "stop"
    client.call("destroy", session)


def test_a_folder_that_holds_only_a_gguf_file_is_a_model(client, tmp_path):
    session = client.create(write_gguf(tmp_path / "model.gguf").parent)
    assert client.ask(session)[-1]["finish_reason"] == "stop"
    client.call("destroy", session)


def test_a_model_may_lie_in_a_folder_and_have_files_whose_names_are_not_utf8(daemon, client, tmp_path):
    folder = make_model(tmp_path / os.fsdecode(b"model\xff"))
    (folder / os.fsdecode(b"notes\xff.json")).write_text("{}")
    (tmp_path / "link").symlink_to(folder)  # an app's JSON is UTF-8
    session = client.create(tmp_path / "link")
    assert client.ask(session)[-1]["finish_reason"] == "stop"
    assert r"model\udcff" in [Path(model["path"]).name for model in daemon.status()["models"]]
    client.call("destroy", session)


def test_an_alias_for_what_is_not_there_is_answered_whatever_its_name(start_daemon, start_client):
    daemon = start_daemon({}, "--alias", f"/data={os.fsdecode(b'/nowhere/' + bytes([255]))}")
    error, _ = start_client(daemon).call("create", json.dumps({"model": "/data/model"}))
    assert error == Code.INVAL


def test_headers_with_random_damage_are_answered(client, tmp_path):
    chance = random.Random(7)
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    for number in range(60):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 6)):
            data[chance.randrange(4, len(data))] = chance.choice([0, 1, 8, 9, 0x7F, 0xFF, chance.randrange(256)])
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(data[: chance.randint(20, len(data))])
        error, session = client.call("create", json.dumps({"model": str(path)}))
        assert error in (Code.OK, Code.INVAL, Code.NOSYS, Code.NOMEM)
        if error == Code.OK:
            client.call("destroy", session)


def children_of(pid: int, name: str) -> list[int]:
    found = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [child for child in found if name in Path(f"/proc/{child}/cmdline").read_text()]


def test_when_the_prober_hangs_create_answers_and_the_next_one_works(start_daemon, start_client, model):
    daemon = start_daemon({})
    client = start_client(daemon)
    (prober,) = children_of(daemon.process.pid, "prober")
    os.kill(prober, signal.SIGSTOP)
    assert client.call("create", json.dumps({"model": str(model)}))[0] == Code.FAULT
    assert client.ask(client.create(model))[-1]["finish_reason"] == "stop"


def test_no_create_is_refused_because_the_prober_was_killed_before(start_daemon, start_client, model):
    daemon = start_daemon({})
    client = start_client(daemon)
    for _ in range(3):
        (prober,) = children_of(daemon.process.pid, "prober")
        os.kill(prober, signal.SIGKILL)
        assert client.ask(client.create(model))[-1]["finish_reason"] == "stop"


DIES_OF_A_QUESTION = """
import socket, sys
asked = socket.socket(fileno=int(sys.argv[1]))
asked.send(b"ready")
asked.recv(1)
"""


def test_a_model_of_which_two_probers_die_is_refused(monkeypatch, model):
    kind = replace(kinds.PROBER, command=(sys.executable, "-c", DIES_OF_A_QUESTION))
    monkeypatch.setattr(kinds, "PROBER", kind)
    started, start = [], Prober._start

    async def counted(prober: Prober) -> Child:
        started.append(prober)
        return await start(prober)

    monkeypatch.setattr(Prober, "_start", counted)
    fd = os.open(model, os.O_RDONLY)
    with pytest.raises(Refused) as caught:
        asyncio.run(Prober("auto").look(fd, os.getpid()))
    os.close(fd)
    assert (caught.value.code, len(started)) == (Code.FAULT, 2)


def call(daemon, frame: Frame, *fds: int) -> Frame:
    """The daemon's answer to a client that is not libqos.so."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(daemon.socket))
        sock.sendall(encode(Frame("H", PROTOCOL)))
        socket.send_fds(sock, [encode(frame)], fds)
        decoder = FrameDecoder()
        while True:
            decoder.feed(sock.recv(4096))
            while (answer := decoder.next_frame()) is not None:
                if answer.op == "r":
                    return answer


def _limit_memory() -> None:
    """As `ulimit -v` does, for this process and without the right to raise it again."""
    ctypes.CDLL(None).prctl(24, 24, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_SYS_RESOURCE: fails where there is no such right
    resource.setrlimit(resource.RLIMIT_AS, (400 * MIB, 400 * MIB))


def test_models_are_looked_at_where_less_memory_is_allowed_than_that_takes_at_most():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(WAIT_S)
    command = [sys.executable, "-m", "kvloom.gewu.prober.main", str(theirs.fileno()), "30"]
    with ours, theirs:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], preexec_fn=_limit_memory)
        theirs.close()
        assert ours.recv(100) == b"ready"
    assert process.wait(WAIT_S) == 0


@pytest.mark.parametrize("flags", [os.O_PATH, os.O_WRONLY])
def test_a_descriptor_that_was_not_opened_to_be_read_is_refused(flags, daemon, tmp_path):
    fd = os.open(write_gguf(tmp_path / "model.gguf"), flags)
    answer = call(daemon, Frame("C", 1, 1, payload=b'{"model": "x"}'), fd)
    os.close(fd)
    assert (answer.b, b"was not opened to be read" in answer.payload) == (Code.NOPERM, True)


_DROP = """
import ctypes, os
libc = ctypes.CDLL(None)
for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
os.execvp("sleep", ["sleep", "60"])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has rights to set aside")
def test_root_opens_no_file_that_the_app_cannot_read(tmp_path):
    folder = make_model(tmp_path / "model")
    os.chown(folder / "config.json", 12345, 12345)
    (folder / "config.json").chmod(0o600)
    fd = os.open(folder, os.O_RDONLY)
    with subprocess.Popen(["python3", "-c", _DROP]) as app:
        until(lambda: Path(f"/proc/{app.pid}/comm").read_text().strip() == "sleep")
        with only_those_of(app.pid), pytest.raises(Refused, match=r"config\.json: Permission denied") as caught:
            open_files(fd)
        assert caught.value.code is Code.NOPERM
        files = open_files(fd)
        assert sorted(files.fds) == ["config.json", "model.safetensors"]
        files.close()
        app.kill()
    os.close(fd)


def test_files_that_are_replaced_or_changed(tmp_path):
    folder = make_model(tmp_path / "model", a=1)
    fd = os.open(folder, os.O_RDONLY)
    files, before = open_files(fd), open_files(fd)
    identity = files.identity()
    (folder / "new").write_text('{"a": 2}')
    (folder / "new").rename(folder / "config.json")
    with files.lay_out() as path:
        assert json.loads((Path(path) / "config.json").read_text()) == {"a": 1}
    assert files.identity() == before.identity() == identity
    later = open_files(fd)
    assert later.identity() != identity
    (folder / "model.safetensors").write_bytes(b"other")
    assert files.identity() != identity
    for opened in (files, before, later):
        opened.close()
    os.close(fd)


def test_a_session_never_answers_with_weights_that_were_written_over(start_daemon, start_client, tmp_path):
    daemon = start_daemon({}, GEWU_IDLE_UNLOAD_S="0.2")
    client = start_client(daemon)
    model = make_model(tmp_path / "model")
    old = client.create(model)
    until(lambda: daemon.model()["loads"] and daemon.model()["state"] == "absent")
    (model / "model.safetensors").write_bytes(b"new")
    (only,) = client.ask(old, stream=False)
    assert only["error"]["code"] == Code.FAULT
    assert "changed since this session was created" in only["error"]["message"]
    new = client.create(model)
    assert client.ask(new)[-1]["finish_reason"] == "stop"
    (only,) = client.ask(old, stream=False)
    assert only["finish_reason"] == "abort"
    assert len(daemon.status()["models"]) == 2


def test_a_session_keeps_the_weights_it_began_with_when_others_take_their_name(start_daemon, start_client, tmp_path):
    daemon = start_daemon({}, GEWU_IDLE_UNLOAD_S="0.2")
    client = start_client(daemon)
    model, other = make_model(tmp_path / "model"), make_model(tmp_path / "other", 2000)
    old = client.create(model)
    until(lambda: daemon.model()["loads"] and daemon.model()["state"] == "absent")
    (other / "model.safetensors").rename(model / "model.safetensors")
    new = client.create(model)
    assert client.ask(old)[-1]["finish_reason"] == client.ask(new)[-1]["finish_reason"] == "stop"
    assert len(daemon.status()["models"]) == 2
