"""`kvloom bench` against real servers on free ports, over the fake model."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest
from typer.testing import CliRunner

from kvloom.bench import cli, load, plot, process, report
from kvloom.bench.client import Answer, BenchError, Target, complete
from kvloom.cli import app
from kvloom.server.serving.options import WireOptions
from tests.support.servers import MODEL, fake_server
from tests.support.waiting import until

BYTES = (0, 256)  # the fake model's token ids


def run_cli(*args):
    return CliRunner().invoke(app, ["bench", "--token-ids", "0,256", *args])


def test_a_load_is_answered_whole_and_its_point_adds_up():
    wanted = load.Load(concurrency=4, num_prompts=6, input_len=20, output_len=7, token_ids=BYTES)
    with fake_server(has_eos=False) as server:
        answers, wall_s = asyncio.run(load.run(Target(server.url, MODEL), wanted, "s"))
    point = load.summarise(wanted, answers, wall_s)
    assert [answer.num_tokens for answer in answers] == [7] * 6
    assert point.tok_s == round(42 / wall_s, 1)
    assert point.num_short == 0
    assert point.requests_s == round(6 / wall_s, 2)
    assert point.total_tok_s == round((42 + 6 * wanted.input_len) / wall_s, 1)
    assert point.e2el_ms.p50 >= point.ttft_ms.p50
    assert 0 < point.ttft_ms.p50 <= point.ttft_ms.p90 <= point.ttft_ms.p99


def test_no_more_requests_are_in_flight_than_asked_for():
    wanted = load.Load(concurrency=3, num_prompts=9, input_len=5, output_len=20, token_ids=BYTES)
    with fake_server(has_eos=False, step_s=0.002) as server:
        answers, _ = asyncio.run(load.run(Target(server.url, MODEL), wanted, "s"))
    edges = sorted([(a.started_s, 1) for a in answers] + [(a.times_s[-1], -1) for a in answers])
    running = [sum(step for _, step in edges[: i + 1]) for i in range(len(edges))]
    assert max(running) == 3


def test_prompts_are_the_same_for_a_seed_and_share_only_what_is_asked_for():
    wanted = load.Load(concurrency=1, num_prompts=3, input_len=8, shared_len=5)
    first, again, other = wanted.prompts("a"), wanted.prompts("a"), wanted.prompts("b")
    assert first == again
    assert first[0][:5] == first[1][:5] == first[2][:5]
    assert len({tuple(prompt[5:]) for prompt in first + other}) == 6


def test_times_of_an_answer():
    answer = Answer(started_s=10.0, times_s=[10.5, 10.75, 11.5], num_tokens=5)
    assert answer.ttft_s == 0.5
    assert answer.tpot_s == 0.25
    assert answer.gaps_s == [0.25, 0.75]


def test_percentiles_interpolate():
    assert load.percentiles([0.0, 0.1]) == load.Percentiles(50.0, 90.0, 99.0)
    assert load.percentiles([0.2]) == load.Percentiles(200.0, 200.0, 200.0)
    assert load.percentiles([]) == load.Percentiles(None, None, None), "nothing measured is not 0"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (Target("ftp://x", "m"), "url: 'ftp://x' is no http:// or https:// address"),
        (Target("http://127.0.0.1:1", "m"), "url: http://127.0.0.1:1 cannot be reached"),
    ],
)
def test_a_server_that_is_not_there_is_one_sentence(target, words):
    with pytest.raises(BenchError, match=words):
        asyncio.run(complete(target, [1], 1))


def test_a_refusal_is_told_as_the_server_put_it():
    options = WireOptions(validates_model=True)
    with (
        fake_server(options=options) as server,
        pytest.raises(BenchError, match=r"the server answered 404: .*no-such-model"),
    ):
        asyncio.run(complete(Target(server.url, "no-such-model"), [1], 1))


def test_the_command_writes_a_line_a_point_and_a_page(tmp_path):
    lines, page = tmp_path / "points.jsonl", tmp_path / "page.html"
    options = ["--concurrency", "1,4", "--num-prompts", "5", "--input-len", "9", "--output-len", "6"]
    with fake_server(has_eos=False) as server:
        result = run_cli("--url", server.url, *options, "--save-json", str(lines), "--plot", str(page))
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(row["level"], row["concurrency"], row["input_len"], row["num_short"]) for row in rows] == [
        ("server", 1, 9, 0),
        ("server", 4, 9, 0),
    ]
    assert f"{rows[1]['tok_s']:,.1f}" in result.output
    assert page.read_text().count("<svg") == 2


def test_the_command_starts_a_server_of_its_own_and_ends_it(tmp_path, monkeypatch):
    started = []

    def command(model, port, options):
        started.append(port)
        return [sys.executable, "-m", "kvloom.cli", "serve", "--backend", "fake", "--port", str(port), *options]

    monkeypatch.setattr(process, "serve_command", command)
    lines = tmp_path / "points.jsonl"
    options = ["--level", "server", "--concurrency", "2", "--num-prompts", "2", "--output-len", "4"]
    result = run_cli(*options, "--save-json", str(lines))
    assert result.exit_code == 0, result.output
    row = json.loads(lines.read_text())
    assert row["start_to_first_answer_s"] > 0
    assert row["peak_rss_mb"] > 10
    with pytest.raises(BenchError, match="cannot be reached"):
        asyncio.run(complete(Target(f"http://127.0.0.1:{started[0]}", "bench"), [1], 1))


def test_a_server_that_ends_at_once_is_told_with_its_last_words():
    command = [sys.executable, "-c", "print('no such port')"]
    target = Target("http://127.0.0.1:1", "m")
    with process.ServerProcess(command) as server, pytest.raises(BenchError, match=r"ended before .*: no such port"):
        server.first_answer_s(target, 30, [1])


def is_halted(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_server_that_is_not_measured_is_halted_with_its_children():
    script = "import subprocess, sys; subprocess.run(['sleep', '100'])"
    with process.ServerProcess([sys.executable, "-c", script]) as server:
        until(lambda: len(process.family(server.pid)) == 2)
        for is_running in (False, True, False):
            server.set_running(is_running)
            wanted = [not is_running] * 2
            until(lambda wanted=wanted: [is_halted(pid) for pid in process.family(server.pid)] == wanted)
    assert not Path(f"/proc/{server.pid}").exists(), "halted, it ends as well"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
@pytest.mark.parametrize("is_running", [True, False], ids=["running", "halted"])
def test_a_server_ends_with_the_bench_that_started_it_however_that_ends(is_running):
    program = (
        "import sys, time; from kvloom.bench.process import ServerProcess\n"
        "with ServerProcess([sys.executable, '-c', 'import time; time.sleep(600)']) as server:\n"
        f"    server.set_running({is_running}); print(server.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as bench:
        server = psutil.Process(int(bench.stdout.readline()))
        bench.kill()
    until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)


def test_the_memory_of_children_is_counted():
    script = "import subprocess, sys; x = bytearray(1); subprocess.run([sys.executable, '-c', sys.argv[1]])"
    child = "x = b'1' * (200 << 20); print('up', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script, child], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        parent.stdout.readline()
        assert process.peak_rss_bytes(parent.pid) > 200 << 20
        parent.communicate(b"\n")
    assert process.peak_rss_bytes(parent.pid) == 0
    assert process.peak_rss_bytes(os.getpid()) > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--concurrency", "1,x"], "concurrency: '1,x' is no list of whole numbers"),
        (["--concurrency", "0"], "concurrency: 0 is below 1"),
        (["--output-len", "0"], "output_len: 0 is below 1"),
        (["--token-ids", "9,5"], "token_ids: 9,5 is no range LOW,HIGH with 0 <= LOW < HIGH"),
        (["--weight-format", "w2"], "weight_format: 'w2' is none of auto, stored, w8a8, w4a8, bf16"),
        (["--level", "none"], "level: 'none' is none of all, server, kernels"),
        (["--url", "http://127.0.0.1:1", "--level", "all"], "level: a server at --url has its own kernels"),
        (["--url", "http://127.0.0.1:1"], "url: http://127.0.0.1:1 does not list its models"),
        (["--url", "http://127.0.0.1:1/v1/"], "url: http://127.0.0.1:1 does not list its models"),
        (["--plot", "/no/folder/p.html"], "/no/folder/p.html: there is no folder /no/folder"),
        (["--plot", "/tmp"], "/tmp: is a folder; name a file"),
    ],
)
def test_a_mistake_is_one_sentence(options, words):
    result = CliRunner().invoke(app, ["bench", *options])
    assert isinstance(result.exception, BenchError)
    assert words in str(result.exception)


def test_a_mistake_of_the_kernels_process_is_one_sentence():
    with pytest.raises(BenchError, match=r"the kernels could not be measured: .*nonsense"):
        cli._kernels("/nonsense/model", None)


def kernel_rows():
    return [
        {"level": "kernel", "name": f"decode_{n}", "batch": n, "tok_s": rate, "limit_tok_s": 300.0 * n, "dram_gb_s": 40}
        for n, rate in ((1, 280.0), (8, 1000.0), (32, 1500.0))
    ]


def point(concurrency, tok_s):
    some = load.Percentiles(1.0, 2.0, 3.0)
    return load.Point(concurrency, 5, 128, 128, tok_s, some, some, some, 0)


def test_the_plot_draws_the_limit_and_stays_well_formed():
    page = report.plot("a <title> & more", [point(8, 900.0), point(1, 250.0)], kernel_rows())
    assert "a &lt;title&gt; &amp; more" in page
    assert "http" not in page
    assert "<script" not in page
    svg = page[page.index("<svg") : page.index("</svg>") + 6]
    root = ElementTree.fromstring(svg)
    lines = root.findall("polyline")
    assert [line.get("stroke-dasharray") is not None for line in lines] == [False, False, True]
    texts = [text.text for text in root.findall("text")]
    assert {"server", "kernels alone", "memory's limit"} <= set(texts)


def test_points_lie_where_their_values_are():
    line = plot.Line("a", [(1, 0.0), (2, 50.0), (4, 100.0)], "#000")
    svg = ElementTree.fromstring(plot.chart(plot.Chart("t", "x", [line], is_log2=True)))
    (drawn,) = svg.findall("polyline")
    (x0, y0), (x1, y1), (x2, y2) = (map(float, pair.split(",")) for pair in drawn.get("points").split())
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y2 < y0


def test_an_ipv6_address_is_in_brackets_in_the_host_header():
    async def asked() -> str:
        heads = []

        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(refuse, "::1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(BenchError, match="answered 400"):
                await complete(Target(f"http://[::1]:{port}", "m"), [1], 1)
        return heads[0].replace(str(port), "PORT")

    assert "\r\nHost: [::1]:PORT\r\n" in asyncio.run(asked())
