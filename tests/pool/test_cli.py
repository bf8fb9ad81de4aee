"""`kvloom pool agent | status | bench | doctor` as a user runs them."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from ems.common import sockets
from kvloom.pool.bench import cli as bench
from kvloom.pool.bench import measure as measuring
from kvloom.pool.bench.measure import Case, measure
from kvloom.pool.bench.redis import find_server
from kvloom.pool.cli import app
from kvloom.pool.commands import status
from kvloom.pool.config import Address, AgentConfig, TenantLimits, parse_size, read_secret
from tests.support.pool.agents import SECRET, config_of, new_kv, running_agent, session, slots_of
from tests.support.waiting import WAIT_S


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_doctor_names_what_is_missing(tmp_path):
    answer = run("doctor", "--socket", str(tmp_path / "none.sock"))
    assert answer.exit_code == 1
    assert "MISS agent" in answer.output
    with running_agent() as agent:
        answer = run("doctor", "--socket", str(agent.config.socket))
    assert (answer.exit_code, "MISS" in answer.output) == (0, False)


def test_status_shows_the_pools(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which is not asked
    kv = new_kv()
    with running_agent(http=("127.0.0.1", 0)) as agent, session(agent.config.socket, kv) as cc:
        cc.save(slots_of(0), [1], [4])
        cc.load(slots_of(0, 1), [1, 2], [4, 4])
        where = ("--socket", str(agent.config.socket), "--http", f"127.0.0.1:{agent.http_port}")
        answer = run("status", "--json", *where)
        assert answer.exit_code == 0
        (pool,) = json.loads(answer.output)["stats"]["pools"]
        assert pool["usage"]["blocks"] == 1
        assert (pool["counts"]["load_hits"], pool["counts"]["miss_cold"]) == (1, 1)
        shown = run("status", *where).output
        assert shown.startswith(f"agent: serving on {agent.config.socket}\n")
        assert "50.0%" in shown
    ended = run("status", *where)
    assert (ended.exit_code, ended.output.splitlines()[0]) == (1, f"agent: does not answer on {agent.config.socket}")


def test_status_says_where_no_socket_is(monkeypatch):
    monkeypatch.setattr(status, "find_socket", lambda: None)
    answer = run("status")
    assert (answer.exit_code, answer.output) == (1, "agent: there is no socket of one; see --socket\n")


def test_status_says_that_an_address_is_none(monkeypatch):
    monkeypatch.setattr(status, "find_socket", lambda: None)
    assert "an address is host:port, got '::1'" in run("status", "--http=::1").output


@pytest.fixture
def _small_rings(monkeypatch):
    """These tests do not check the figures, so memory need not exceed the processor's caches."""
    monkeypatch.setattr(measuring, "_RING_BYTES", 1)


@pytest.mark.usefixtures("_small_rings")
def test_bench_puts_the_pool_beside_memcpy_and_other_stores():
    body = bench.run(rounds=2, sizes=(64 << 10,), num_clients=2, has_fragmented=False)
    (row,) = body["rows"]
    assert (row["block_bytes"], row["fragments"]) == (65536, 1)
    for name in ("save", "direct_save", "load", "remote_load"):
        assert 0 < row[f"{name}_ratio"] == pytest.approx(row[name] / row["memcpy"], rel=0.1)
    assert min(row[name] for name in ("tcp", "load_one_us", "exists_us", "ping_us")) > 0
    assert row["checksum_share"] < 1  # below 0 if noise exceeds the checksum's cost
    assert (body["clients"]["clients"], body["clients"]["p99_to_p50"] >= 1) == (2, True)
    if find_server() is None:
        pytest.skip("the columns of Redis need valkey-server or redis-server")
    assert min(row["redis_save"], row["redis_load"]) > 0


@pytest.mark.usefixtures("_small_rings")
def test_bench_gathers_fragments():
    row = measure(Case(64 << 10, fragments=8), rounds=1)
    assert (row["fragments"], row["save_ratio"] > 0, row["direct_save_ratio"] > 0) == (8, True, True)


@pytest.mark.parametrize("argument", ["--rounds=0", "--rounds=9999999", "--clients=257", "--size=1", "--size=17M"])
def test_bench_as_a_user_runs_it(argument):
    answer = run("bench", argument)
    assert (answer.exit_code, f"'{argument.partition('=')[0]}'" in answer.output) == (2, True)


@pytest.mark.usefixtures("really_started")
def test_an_agent_ends_on_sigterm_and_removes_its_socket(tmp_path):
    path = tmp_path / "a.sock"
    command = [sys.executable, "-m", "kvloom", "pool", "agent", f"--socket={path}", "--pool=16M", "--no-prefault"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert b"serving" in process.stdout.readline()
        assert path.exists()
        assert "cryptography" not in Path(f"/proc/{process.pid}/maps").read_text(), "nobody asked for TLS"
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    assert not path.exists()


@pytest.mark.parametrize("given", [os.devnull, __file__], ids=["null", "file"])
@pytest.mark.usefixtures("really_started")
def test_an_agent_that_ends_with_its_input_takes_a_file_for_it(tmp_path, given):
    command = [sys.executable, "-m", "kvloom", "pool", "agent", f"--socket={tmp_path / 'a.sock'}", "--pool=16M"]
    with Path(given).open() as source:
        done = subprocess.run(
            [*command, "--no-prefault", "--ends-with-stdin"], stdin=source, stderr=subprocess.PIPE, timeout=WAIT_S
        )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(("text", "size"), [("512", 512), ("64K", 65536), ("2g", 2 << 30)])
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(("text", "problem"), [("0", "positive"), ("-1K", "positive"), ("x", "a size is")])
def test_wrong_sizes(text, problem):
    with pytest.raises(ValueError, match=problem):
        parse_size(text)


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("--pool=3Q", "a size is a positive number, as 512, 64K, 16M or 2G, got '3Q'"),
        ("--pool=9999T", "bytes are more than the"),
        ("--slab=0", "a size is a positive number, as 512, 64K, 16M or 2G, got '0'"),
        ("--rcache=much", "a share is a number from 0 to 1, got 'much'"),
        ("--eviction=fifo", "'fifo' is none of s3fifo, lru"),
        ("--socket-mode=9", "permissions are three octal digits"),
        ("--socket-group=no-such-group", "this machine has no group 'no-such-group'"),
        ("--max-sessions=0", "must be a positive number, got '0'"),
        ("--peer-connections=no", "must be a positive number, got 'no'"),
        ("--listen=nowhere", "an address is host:port, got 'nowhere'"),
        ("--http=http://host:9", "an address is host:port, got 'http://host:9'"),
        ("--http=host:99999", "an address is host:port, got 'host:99999'"),
        ("--http=::1", "an address is host:port, got '::1'"),
        ("--listen=[::1", "an address is host:port, got '[::1'"),
        ("--listen=[]:1", "an address is host:port, got '[]:1'"),
        ("--peer=b=1.2.3.4:1:1", "1.2.3.4:1:1"),
        ("--peer=b=a b:1", "a b:1"),
        ("--tenant=a:1G", "a tenant's limits are id:guarantee:quota, got 'a:1G'"),
        ("--tenant=a:2G:1G", "a guarantee of at most its quota, got 'a:2G:1G'"),
        ("--peer=b", "a peer is id=host:port, got 'b'"),
    ],
)
def test_a_wrong_argument_is_told_in_words(argument, problem):
    answer = run("agent", argument)
    text = " ".join(answer.output.translate(str.maketrans("│╭╮╰╯─", "      ")).split())
    assert (answer.exit_code, problem in text, f"'{argument.partition('=')[0]}'" in text) == (2, True, True), text


def test_arguments_become_a_configuration(tmp_path):
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    config = config_of(
        "--pool=64M",
        "--tenant=a:16M:32M",
        "--tenant=b:0:1M",
        f"--secret-file={tmp_path / 'secret'}",
        "--peer=b=[::1]:7",
        "--listen=0.0.0.0:9",
        "--plaintext-peers",
        "--no-prefault",
        "--socket-mode=600",
        "--allowed-host=Pool",
    )
    assert config.tenants == (TenantLimits("a", 16 << 20, 32 << 20), TenantLimits("b", 0, 1 << 20))
    assert config.peers == (Address("b", "::1", 7),)
    assert (config.secret, config.listen) == (SECRET, ("0.0.0.0", 9))
    assert (config.is_prefaulted, config.socket_mode, config.allowed_hosts) == (False, 0o600, frozenset({"pool"}))


def test_without_arguments_an_agent_has_the_defaults_of_its_configuration():
    named = {"socket": sockets.serving_path(), "node_id": "n"}
    assert replace(config_of(), **named) == replace(AgentConfig(), **named)
    config = config_of("--engine=valkey://a")
    assert (config.rcache_share, config.engine) == (1.0, "valkey://a")


CONTROLLED = {"control_url": "http://127.0.0.1:8081", "secret": SECRET, "has_plaintext_peers": True}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"slab_bytes": 5}, "^--slab: "),
        ({"segment_bytes": 20 << 20}, "^--segment: "),
        ({"rcache_share": 2.0}, "^--rcache: "),
        ({"is_open": False}, "^--secret-file: "),
        ({"eviction": "fifo"}, "^--eviction: "),
        ({"state": Path("x")}, "^--state: "),
        ({"engine": "valkey://a", "peers": (Address("b", "c", 1),), "secret": SECRET}, "^--engine: "),
        ({"engine": "valkey://a", "is_direct": True}, "^--direct: "),
        ({"is_open": False, "secret": SECRET, "is_direct": True}, "^--direct: "),
        ({"node_id": "a/b"}, "^--node-id: .* got 'a/b'"),
        ({"peers": (Address("b", "c", 1), Address("b", "d", 1)), "secret": SECRET}, "^--peer: b is there twice"),
        *(
            ({"control_url": url, "secret": SECRET}, "^--control: an address as http://")
            for url in ("10.0.0.1:8081", "http://:1", "http://[::1", "http://[::1]:x", "http://a b", "http://a:65536")
        ),
        ({"advertise": "10.0.0.1:9300"}, "^--advertise: .* give --control too"),
        ({**CONTROLLED, "advertise": "nowhere"}, "^--advertise: an address is host:port, got 'nowhere'"),
        ({**CONTROLLED, "advertise": "0.0.0.0:9300"}, "^--advertise: other nodes cannot call 0.0.0.0:9300"),
        ({**CONTROLLED, "listen": ("::", 9300)}, "^--advertise: --listen :: is every address"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(changes, name):
    with pytest.raises(ValueError, match=name):
        AgentConfig(**changes)


def test_a_short_secret_is_refused(tmp_path):
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(ValueError, match="32 bytes"):
        read_secret(tmp_path / "secret")


def test_a_pool_that_is_no_whole_slabs_is_taken():
    config = config_of("--pool=40M")
    assert (config.pool_bytes, config.segment_bytes, config.slab_bytes) == (40 << 20, 32 << 20, 16 << 20)


def test_help_shows_defaults():
    text = run("agent", "--help").output
    for shown in ("[default: (1G)]", "[default: (64M)]", "[default: (16M)]", "[default: (256)]", "[default: (660)]"):
        assert shown in text


def test_credentials_are_made_for_an_agent_and_opened_by_their_key(tmp_path):
    file, key = tmp_path / "credentials.json", tmp_path / "key"
    assert run("credentials", str(file), "--access-id=a", f"--key-file={key}").exit_code == 0
    printed = run("credentials", str(file), "--access-id=b", "--tenant=a")
    assert (printed.exit_code, len(printed.output.strip())) == (0, 64)
    assert (file.stat().st_mode & 0o777, key.stat().st_mode & 0o777) == (0o600, 0o600)
    assert key.read_text().strip() not in file.read_text()
    assert run("credentials", str(file), "--access-id=A").exit_code == 1
    assert "tenant: must be 1 to 512" in run("credentials", str(file), "--access-id=c", f"--tenant={'x' * 513}").output
    with running_agent(credentials=file, is_open=False, secret=SECRET) as agent:
        socket = ("--socket", str(agent.config.socket))
        assert run("doctor", *socket, "--access-id=a", f"--access-key-file={key}").exit_code == 0
        refused = run("doctor", *socket)
        assert (refused.exit_code, "--access-key-file" in refused.output) == (1, True)
        assert "agent: serving" in run("status", *socket).output
        with session(agent.config.socket, new_kv(), access_id="b", access_key=printed.output.strip()) as cc:
            assert cc.save(slots_of(0), [1], [4]).success == 1
            assert agent.node.pool("a").usage()["blocks"] == 1


def test_a_key_that_cannot_be_kept_leaves_the_old_one_valid(tmp_path):
    file = tmp_path / "credentials.json"
    assert run("credentials", str(file), "--access-id=a").exit_code == 0
    before = file.read_bytes()
    for key in (file, tmp_path):
        refused = run("credentials", str(file), "--access-id=a", f"--key-file={key}")
        assert (refused.exit_code, str(key) in refused.output) == (1, True)
        assert file.read_bytes() == before


def test_a_socket_is_for_whom_it_is_said_to_be(tmp_path):
    path = tmp_path / "made" / "ems.sock"
    with running_agent(socket=path, socket_mode=0o666):
        assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o666, 0o755)
    other = tmp_path / "other" / "ems.sock"
    group = os.getgroups()[0] if os.getgroups() else os.getgid()
    with running_agent(socket=other, socket_group=group):
        assert (other.stat().st_mode & 0o777, other.stat().st_gid, other.parent.stat().st_gid) == (0o660, group, group)
        assert other.parent.stat().st_mode & 0o777 == 0o750


def test_agent_and_sdk_agree_where_the_socket_is(tmp_path, monkeypatch):
    monkeypatch.delenv("EMS_SOCKET", raising=False)
    monkeypatch.setattr(sockets, "DOCUMENTED_SOCKET", tmp_path / "shm" / "ems" / "ems.sock")
    monkeypatch.setattr(sockets, "own_folder", lambda: tmp_path / "own")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    for uid, is_made, expected in ((0, False, "shm/ems"), (1000, True, "shm/ems"), (1000, False, "run/ems")):
        (tmp_path / "run").mkdir(exist_ok=True)
        if is_made:
            (tmp_path / "shm" / "ems").mkdir(parents=True)
        monkeypatch.setattr(sockets.os, "getuid", lambda uid=uid: uid)
        path = sockets.serving_path()
        assert path == tmp_path / expected / "ems.sock"
        with running_agent(socket=path):
            assert sockets.find_socket() == path
        shutil.rmtree(tmp_path / "shm", ignore_errors=True)
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert sockets.serving_path() == tmp_path / "own" / "ems.sock"
    with running_agent(socket=tmp_path / "own" / "ems.sock"):
        assert sockets.find_socket() is None, "a folder of another user is not trusted"
        monkeypatch.setattr(sockets.os, "getuid", lambda: os.stat(tmp_path / "own").st_uid)
        assert sockets.find_socket() == tmp_path / "own" / "ems.sock"
    monkeypatch.setenv("EMS_SOCKET", "/named")
    assert (sockets.serving_path(), sockets.find_socket()) == (Path("/named"), Path("/named"))


def test_a_file_of_credentials_is_checked_also_where_assertions_are_off(tmp_path):
    file = tmp_path / "credentials.json"
    file.write_text('[{"access_id": "a", "tenant": "t", "salt": "00", "verifiers": {"aa": 1}}]')
    command = [sys.executable, "-O", "-m", "kvloom.cli", "pool", "credentials", str(file), "--access-id", "b"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, "not a credential: " in ended.stderr) == (1, True)


@pytest.mark.parametrize("option", ["--secret-file", "--engine-password-file", "--credentials"])
def test_a_file_that_is_missing_is_told_by_its_option(option, tmp_path):
    answer = run(
        "agent", f"--socket={tmp_path / 's'}", f"--secret-file={secret_in(tmp_path)}", f"{option}={tmp_path}/none"
    )
    assert answer.exit_code == 1
    assert answer.output == f"kvloom pool agent: {option}: {tmp_path}/none: No such file or directory\n"


def test_a_token_file_that_is_empty_is_told_by_its_option(tmp_path):
    (tmp_path / "token").touch()
    answer = run("control", f"--secret-file={secret_in(tmp_path)}", f"--admin-token-file={tmp_path / 'token'}")
    assert answer.output == f"kvloom pool control: --admin-token-file: {tmp_path / 'token'} is empty\n"


HALF_A_BODY = b"PUT /v1/tenants/a HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer t\r\nContent-Length: 9\r\n\r\n{"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("sent", [b"", HALF_A_BODY], ids=["idle", "half a body"])
@pytest.mark.usefixtures("really_started")
def test_a_control_plane_ends_on_a_signal_whatever_its_clients_do(tmp_path, number, sent):
    (tmp_path / "token").write_text("t")
    files = f"--secret-file={secret_in(tmp_path)}", f"--admin-token-file={tmp_path / 'token'}"
    options = *files, f"--state={tmp_path / 'db'}", "--listen=127.0.0.1:0", "--allowed-host=x"
    command = [sys.executable, "-m", "kvloom", "pool", "control", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        port = int(process.stdout.readline().rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(sent)
            assert httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200  # so it has read what was sent
            process.send_signal(number)
            assert process.wait(WAIT_S) == 0
        assert "Traceback" not in process.stderr.read()


def secret_in(folder: Path) -> Path:
    (folder / "secret").write_bytes(SECRET)
    return folder / "secret"
