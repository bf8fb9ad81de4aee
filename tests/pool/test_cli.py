"""`kvloom pool agent | status | bench | doctor` as a user runs them."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvloom.pool.agent import config_from
from kvloom.pool.bench import __main__ as bench
from kvloom.pool.bench.measure import Case, measure
from kvloom.pool.bench.redis import find_server
from kvloom.pool.cli import app
from kvloom.pool.config import Address, AgentConfig, TenantLimits, parse_size, read_secret
from tests.support.pool import SECRET, new_kv, running_agent, session, slots_of


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_doctor_names_what_is_missing(tmp_path):
    answer = run("doctor", "--socket", str(tmp_path / "none.sock"))
    assert answer.exit_code == 1
    assert "MISS agent" in answer.output
    with running_agent() as agent:
        answer = run("doctor", "--socket", str(agent.config.socket))
    assert (answer.exit_code, "MISS" in answer.output) == (0, False)


def test_status_shows_the_pools():
    kv = new_kv()
    with running_agent(http=("127.0.0.1", 0)) as agent, session(agent.config.socket, kv) as cc:
        cc.save(slots_of(0), [1], [4])
        cc.load(slots_of(0, 1), [1, 2], [4, 4])
        place = ("--socket", str(agent.config.socket), "--http", f"127.0.0.1:{agent.http_port}")
        answer = run("status", "--json", *place)
        assert answer.exit_code == 0
        (pool,) = json.loads(answer.output)["stats"]["pools"]
        assert pool["usage"]["blocks"] == 1
        assert (pool["counts"]["load_hits"], pool["counts"]["miss_cold"]) == (1, 1)
        assert "50.0%" in run("status", *place).output
    assert run("status", *place).exit_code == 1


def test_bench_puts_the_pool_beside_memcpy_and_other_stores():
    body = bench.run(rounds=2, sizes=(64 << 10,), num_clients=2, has_fragmented=False)
    (row,) = body["rows"]
    assert (row["block_bytes"], row["fragments"]) == (65536, 1)
    for name in ("save", "direct_save", "load", "remote_load"):
        assert 0 < row[f"{name}_ratio"] == pytest.approx(row[name] / row["memcpy"], rel=0.1)
    assert min(row[name] for name in ("tcp", "load_one_us", "exists_us", "ping_us", "checksum_share")) > 0
    assert (body["clients"]["clients"], body["clients"]["p99_to_p50"] >= 1) == (2, True)
    if find_server() is None:
        pytest.skip("the columns of Redis need valkey-server or redis-server")
    assert min(row["redis_save"], row["redis_load"]) > 0


def test_bench_gathers_fragments():
    row = measure(Case(256 << 10, fragments=8), rounds=1)
    assert (row["fragments"], row["save_ratio"] > 0, row["direct_save_ratio"] > 0) == (8, True, True)


def test_bench_as_a_user_runs_it(capfd):
    assert run("bench", "--rounds=0").exit_code == 2
    assert "--rounds: at least 1" in capfd.readouterr().err


def test_an_agent_ends_on_sigterm_and_removes_its_socket(tmp_path):
    path = tmp_path / "a.sock"
    code = "from kvloom.pool.cli import app; app()"
    command = [sys.executable, "-c", code, "agent", f"--socket={path}", "--pool=16M", "--no-prefault"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert b"serving" in process.stdout.readline()
        assert path.exists()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    assert not path.exists()


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
        ("--pool=3Q", "argument --pool: a size is a positive number, as 512, 64K, 16M or 2G, got '3Q'"),
        ("--slab=0", "argument --slab: a size is a positive number, as 512, 64K, 16M or 2G, got '0'"),
        ("--listen=nowhere", "argument --listen: an address is host:port, got 'nowhere'"),
        ("--http=host:99999", "argument --http: an address is host:port, got 'host:99999'"),
        ("--tenant=a:1G", "argument --tenant: a tenant's limits are id:guarantee:quota, got 'a:1G'"),
        ("--peer=b", "argument --peer: a peer is id=host:port, got 'b'"),
    ],
)
def test_a_wrong_argument_is_told_in_words(argument, problem, capsys):
    with pytest.raises(SystemExit):
        config_from([argument])
    assert capsys.readouterr().err.endswith(f"error: {problem}\n")


def test_arguments_become_a_configuration(tmp_path):
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    config = config_from(
        [
            "--pool=64M",
            "--tenant=a:16M:32M",
            f"--secret-file={tmp_path / 'secret'}",
            "--peer=b=[::1]:7",
            "--listen=0.0.0.0:9",
        ]
    )
    assert config.tenants == (TenantLimits("a", 16 << 20, 32 << 20),)
    assert config.peers == (Address("b", "::1", 7),)
    assert (config.secret, config.listen) == (SECRET, ("0.0.0.0", 9))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"slab_bytes": 5}, "slab_bytes"),
        ({"segment_bytes": 20 << 20}, "segment_bytes"),
        ({"rcache_share": 2.0}, "rcache_share"),
        ({"is_open": False}, "secret"),
        ({"eviction": "fifo"}, "eviction"),
        ({"state": Path("x")}, "state"),
        ({"engine": "valkey://a", "peers": (Address("b", "c", 1),), "secret": SECRET}, "engine"),
        ({"engine": "valkey://a", "is_direct": True}, "is_direct"),
        ({"is_open": False, "secret": SECRET, "is_direct": True}, "is_direct"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(changes, name):
    with pytest.raises(ValueError, match=name):
        AgentConfig(**changes)


def test_a_short_secret_is_refused(tmp_path):
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(ValueError, match="32 bytes"):
        read_secret(str(tmp_path / "secret"))
