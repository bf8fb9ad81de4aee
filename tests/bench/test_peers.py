"""`python -m benches.server.peers`: several servers in interleaved rounds."""

import json
import os
import socket
import statistics
from pathlib import Path

import pytest
from benches.server import peers

from kvloom.bench import process
from kvloom.bench.client import BenchError
from tests.support.servers import MODEL, fake_server


def run_main(monkeypatch, *args):
    monkeypatch.setattr("sys.argv", ["peers", *args])
    return peers.main()


def test_rounds_and_ratios_of_two_running_servers(tmp_path, monkeypatch, capsys):
    lines = tmp_path / "peers.jsonl"
    with fake_server(has_eos=False, step_s=0.001) as fast, fake_server(has_eos=False, step_s=0.002) as slow:
        options = ["--peer", f"fast={fast.url},{MODEL}", "--peer", f"slow={slow.url},{MODEL}", "--rounds", "2"]
        code = run_main(monkeypatch, *options, "--share", "0.05", "--token-ids", "0", "256", "--save-json", str(lines))
    assert code == 0, capsys.readouterr().err
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(row["server"], row.get("round")) for row in rows] == [
        ("fast", 0), ("fast", 1), ("slow", 0), ("slow", 1), ("fast", None),
    ]  # fmt: skip
    of = {name: statistics.median(row["c8"] for row in rows[:4] if row["server"] == name) for name in ("fast", "slow")}
    assert rows[-1]["ratios"]["c8"] == {"ratio": pytest.approx(of["fast"] / of["slow"], abs=0.01), "to": "slow"}
    assert rows[-1]["ratios"].keys() >= {"ttft_128", "c32", "ttft_1024"}
    assert {"prefix", "gap_p99", "rss"} <= rows[0].keys()


def test_a_ratio_is_to_the_best_other_and_above_one_is_ahead():
    values = {
        "own": {"c8": 900.0, "ttft_1024": 300.0},
        "a": {"c8": 300.0, "ttft_1024": 450.0, "start": 1.0},
        "b": {"c8": 450.0, "ttft_1024": 600.0},
    }
    assert peers.ratios(values) == {"c8": (2.0, "b"), "ttft_1024": (1.5, "a")}


def test_medians_are_taken_row_by_row():
    assert peers.medians([{"c8": 1.0, "rss": 9.0}, {"c8": 5.0, "rss": 8.0}, {"c8": 3.0, "rss": 7.0}]) == {
        "c8": 3.0,
        "rss": 8.0,
    }


@pytest.mark.parametrize(
    ("given", "starts", "words"),
    [
        (["x"], [], "peer: 'x' is not NAME=VALUE"),
        (["a=http://h:1"], [], "peer: 'a=http://h:1' is not NAME=URL,MODEL"),
        (["a=http://h:1,m", "a=http://h:2,m"], [], "peer: a is given twice"),
        (["a=http://h:1,m"], ["b=serve"], "start: b is the name of no --peer"),
    ],
)
def test_a_mistake_is_one_sentence(given, starts, words):
    with pytest.raises(BenchError) as caught:
        peers.parse_peers(given, starts)
    assert str(caught.value) == words


def test_the_server_that_fails_is_named(monkeypatch, capsys):
    assert run_main(monkeypatch, "--peer", "gone=http://127.0.0.1:1,m", "--rounds", "1") == 1
    assert capsys.readouterr().err.strip().startswith("peers: gone: url: http://127.0.0.1:1 cannot be reached")


def test_the_listener_of_a_port_is_found():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert process.listener_pid(port) == os.getpid()
    assert process.listener_pid(port) is None


def test_a_server_that_closes_a_connection_meanwhile_is_found(monkeypatch):
    """Its descriptors are listed first and then looked at one by one."""
    readlink, gone = os.readlink, []

    def closing(path: Path) -> str:
        if str(path).startswith(f"/proc/{os.getpid()}/fd/") and not gone:
            gone.append(path)
            raise FileNotFoundError(path)
        return readlink(path)

    monkeypatch.setattr(os, "readlink", closing)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        assert process.listener_pid(server.getsockname()[1]) == os.getpid()
    assert gone
