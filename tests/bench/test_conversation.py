"""`kvloom bench --scenario conversation`: what is asked, and what counts as computed again."""

import asyncio
import itertools
import json
from collections.abc import Sequence

import httpx
import pytest
from typer.testing import CliRunner

from kvloom.bench import conversation, report
from kvloom.bench.client import Answer, BenchError, Target
from kvloom.bench.conversation import KINDS, Exchange, Player, Script
from kvloom.bench.hits import between, figures_of
from kvloom.cli import app
from tests.support.servers import MODEL, fake_server

SMALL = {"num_turns": 4, "num_branches": 3, "shared_len": 40, "input_len": 6, "output_len": 8, "token_ids": (0, 256)}
TARGET = Target("http://127.0.0.1:1", "m")


class Server:
    """Answers with tokens that no prompt has; says that it found `found(prompt)` tokens."""

    def __init__(self, found=lambda prompt: 0, **wrong: object) -> None:
        self.prompts: list[list[int]] = []
        self._num_cached, self._wrong, self._next = found, wrong, itertools.count(1000)

    async def complete(self, target: Target, prompt: Sequence[int], num_tokens: int, more=None) -> Answer:
        self.prompts.append(list(prompt))
        ids = [next(self._next) for _ in range(num_tokens)]
        answer = Answer(1.0, [1.5, 2.0], num_tokens, len(prompt), self._num_cached(prompt), ids)
        for name, value in self._wrong.items():
            setattr(answer, name, value)
        return answer


def played(monkeypatch, server: Server, times: int = 1) -> list[list[Exchange]]:
    async def way(target, prompt):
        return {}

    monkeypatch.setattr(conversation, "complete", server.complete)
    monkeypatch.setattr(conversation, "way_to_ids", way)
    player = Player(Script(**SMALL), "s")
    return [asyncio.run(player.play(TARGET)) for _ in range(times)]


def test_the_script_has_its_requests_in_order_and_each_continues_what_it_should(monkeypatch):
    server = Server()
    (found,) = played(monkeypatch, server)
    kinds = [kind for kind, count in zip(KINDS, (4, 1, 1, 4, 3, 3), strict=True) for _ in range(count)]
    assert [each.kind for each in found] == kinds
    assert len(found) == Script(**SMALL).num_requests
    assert [each.num_new for each in found] == [46, 6, 6, 6, 1, 6, 24, 24, 24, 24, 6, 6, 6, 6, 6, 6]
    assert [len(prompt) for prompt in server.prompts] == [
        46, 60, 74, 88, 88, 74, 120, 146, 172, 198, 46, 46, 46, 60, 60, 60,
    ]  # fmt: skip


def test_tokens_that_were_computed_before_and_are_computed_again_are_counted(monkeypatch):
    (found,) = played(monkeypatch, Server(lambda prompt: 16 * (len(prompt) // 20)))
    again = {each.kind: each.num_recomputed for each in found if each.number == 1}
    assert again == {"turn": 0, "regenerated": 87 - 64, "edited": 74 - 6 - 48, "tool call": 96 - 96, "branch": 8,
                     "second turn": 60 - 6 - 48}  # fmt: skip


def test_played_again_everything_is_known_but_the_last_token(monkeypatch):
    first, again = played(monkeypatch, Server(), times=2)
    shared = [each for each in again if each.kind in ("turn", "branch") and each.number == 1]
    assert [each.num_new for each in shared] == [1, 1]
    assert [each.num_prompt for each in again] == [each.num_prompt for each in first]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_prompt": 47}, "the server counts 47 tokens of a prompt of 46 token ids"),
        ({"num_cached": None}, "the server does not say how many tokens it found cached"),
        ({"token_ids": [1]}, "the server names 1 of 8 tokens of an answer"),
    ],
)
def test_a_server_that_does_not_say_what_is_needed_is_told(monkeypatch, wrong, words):
    with pytest.raises(BenchError, match=words):
        played(monkeypatch, Server(**wrong))


def exchanges() -> list[Exchange]:
    return [Exchange(kind, number, 100, 10, 70, 5.0 * number, 1.0) for kind in KINDS for number in (1, 2)]


def test_the_page_has_a_line_for_each_kind():
    page = report.conversation_plot("t", exchanges())
    assert page.count("<svg") == 2
    assert all(page.count(f">{kind}</text>") == 2 for kind in KINDS)


@pytest.mark.parametrize(("status", "text"), [(404, ""), (200, "llamacpp:tokens 1\n"), (200, "<html>")])
def test_a_server_without_figures_of_its_cache_has_none(monkeypatch, status, text):
    assert figures_of(TARGET) == {}, "nothing listens there"
    reply = httpx.Response(status, text=text, request=httpx.Request("GET", TARGET.url))
    monkeypatch.setattr(httpx, "get", lambda *args, **options: reply)
    assert figures_of(TARGET) == {}


def test_counters_are_of_the_run_and_gauges_of_its_end():
    before, after = {"snapshot_hits": 3, "snapshots": 5}, {"snapshot_hits": 7, "snapshots": 6, "block_hits": 2}
    assert between(before, after) == {"snapshot_hits": 4, "snapshots": 6, "block_hits": 2}


def run_cli(*args):
    return CliRunner().invoke(app, ["bench", "--scenario", "conversation", *args])


def test_the_command_plays_it_against_a_server_and_writes_a_line_a_request(tmp_path):
    lines, page = tmp_path / "lines.jsonl", tmp_path / "page.html"
    sizes = ["--num-turns", "4", "--num-branches", "3", "--shared-len", "40", "--input-len", "6", "--output-len", "8"]
    with fake_server(has_eos=False) as server:
        options = ["--url", server.url, "--model", MODEL, "--token-ids", "0,256", "--save-json", str(lines)]
        result = run_cli(*options, *sizes, "--plot", str(page))
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [row["num_new"] for row in rows] == [46, 6, 6, 6, 1, 6, 24, 24, 24, 24, 6, 6, 6, 6, 6, 6]
    assert all(row["num_recomputed"] <= 1 for row in rows), "the last token of an answer"
    assert rows[0]["peak_rss_mb"] > 10
    num_cached = sum(row["num_cached"] for row in rows)
    assert 0 <= 16 * rows[0]["block_hits"] - num_cached < 16 * len(rows), "of one block a request a part alone"
    assert f"block_hits: {rows[0]['block_hits']}\n" in result.output
    assert [rows[0][name] for name in ("window_hits", "snapshot_hits", "stateless_tokens", "snapshots")] == [0] * 4
    assert "regenerated" in result.output
    assert page.read_text().count("<svg") == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--concurrency", "4"], "concurrency: --scenario conversation has none"),
        (["--num-prompts", "4"], "num_prompts: --scenario conversation has none"),
        (["--level", "server"], "level: --scenario conversation has none"),
        (["--num-turns", "0"], "num_turns: 0 is below 1"),
        (["--input-len", "0"], "input_len: 0 is below 1"),
        (["--scenario", "none"], "scenario: 'none' is none of load, conversation"),
        (["--scenario", "load", "--num-turns", "3"], "num_turns: --scenario load has none"),
    ],
)
def test_an_option_of_the_other_scenario_is_refused(options, words):
    result = run_cli("--url", "http://127.0.0.1:1", *options)
    assert isinstance(result.exception, BenchError)
    assert words in str(result.exception)
