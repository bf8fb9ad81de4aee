"""One plain server computes prompts, another one answers: kv_transfer_params over an EMS pool, and vLLM's router."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.configs import mock_document
from tests.support.pool.faults import AgentProcess
from tests.support.processes import ServeProcess, serve
from tests.support.waiting import until
from tests.support.wire.routers import VLLM, router, text_of

PROMPT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 4
TEXT = {"model": "smollm2", "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
CHAT = {**TEXT, "messages": [{"role": "user", "content": PROMPT}]}
PATHS = pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
ASK = {"do_remote_decode": True, "do_remote_prefill": False, "remote_block_ids": None, "remote_host": None}
Json = dict[str, Any]


@dataclass(slots=True)
class Parted:
    """Two servers on one pool and a client of the router in front of them; and a third server without a pool."""

    prefill: ServeProcess
    decode: ServeProcess
    lone: ServeProcess
    client: httpx.Client


@contextmanager
def pooled(folder: Path, socket: Path | None) -> Iterator[ServeProcess]:
    """A server with the mock model, whose KV cache holds real bytes; with a pool if `socket` is given."""
    document = mock_document()
    document["OtherParam"]["ResourceParam"]["cacheBlockSize"] = 16
    if socket is not None:
        document["ModelDeployParam"]["kvPoolConfig"] = {"backend": "ems", "socketPath": str(socket), "timeoutMs": 5000}
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps(document))
    file.chmod(0o640)
    with serve("--config", str(file)) as running:
        yield running


@pytest.fixture(scope="module")
def parted(tmp_path_factory) -> Iterator[Parted]:
    folder = tmp_path_factory.mktemp("parted")
    with ExitStack() as stack:
        agent = stack.enter_context(AgentProcess(folder / "ems.sock"))
        one, two = (stack.enter_context(pooled(folder / name, agent.socket)) for name in ("prefill", "decode"))
        lone = stack.enter_context(pooled(folder / "lone", None))
        until(lambda: computed(two, TEXT).get("kv_pool", {}).get("pool"))  # its name is known after the first steps
        arguments = ("--vllm-pd-disaggregation", "--prefill", one.url, "--decode", two.url)
        yield Parted(one, two, lone, stack.enter_context(router(VLLM, *arguments)))


def ask(server: ServeProcess, path: str, body: Json, **fields: Any) -> httpx.Response:
    return httpx.post(server.url + path, json={**body, **fields}, timeout=120)


def computed(server: ServeProcess, body: Json) -> Json:
    """Let the server compute a prompt for another server; the kv_transfer_params of its answer."""
    answer = ask(server, "/v1/completions", {**body, "max_tokens": 1}, kv_transfer_params=ASK)
    assert answer.status_code == 200, answer.text
    told: Json = answer.json()["kv_transfer_params"]
    return told


def num_cached(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def num_loaded(server: ServeProcess) -> int:
    """The number of tokens whose blocks the server has loaded from the pool."""
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    [line] = [line for line in lines if line.startswith("kv_tier_loaded_blocks_total{")]
    return 16 * int(float(line.split()[-1]))


def choices(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def fresh(body: Json, name: str) -> Json:
    """The same body with a prompt that no server has computed yet."""
    if "messages" in body:
        return {**body, "messages": [{"role": "user", "content": name + PROMPT}]}
    return {**body, "prompt": name + PROMPT}


@PATHS
@pytest.mark.parametrize(
    "more", [{}, {"n": 2, "temperature": 1, "seed": 5}, {"logprobs": 1}], ids=["", "n", "logprobs"]
)
def test_a_router_drives_two_servers_and_the_answer_is_a_lone_ones(parted: Parted, path: str, body: Json, more: Json):
    if "messages" in body and "logprobs" in more:
        more = {"logprobs": True}
    asked = fresh({**body, **more}, f"{path} {more} ")
    before = num_loaded(parted.decode)
    answer = parted.client.post(path, json=asked)
    assert choices(answer) == choices(ask(parted.lone, path, asked))
    assert num_loaded(parted.decode) - before >= 18 * 16  # usage shows the first server's cached tokens
    events = parted.client.post(path, json={**asked, "stream": True})
    assert text_of(events.text) == text_of(ask(parted.lone, path, asked, stream=True).text)
    assert "kv_transfer_params" not in answer.text + events.text


def test_what_the_first_server_tells_is_what_the_second_needs(parted: Parted):
    asked = fresh(TEXT, "told ")
    told = computed(parted.prefill, asked)
    assert (told["do_remote_prefill"], told["do_remote_decode"]) == (True, False)
    assert told["kv_pool"]["num_tokens"] == len(told["remote_block_ids"]) * told["kv_pool"]["block_size"] >= 304
    assert told["remote_engine_id"] == "ems-" + told["kv_pool"]["pool"]
    answer = ask(parted.decode, "/v1/completions", asked, kv_transfer_params=told)
    assert choices(answer) == choices(ask(parted.lone, "/v1/completions", asked))
    assert num_cached(answer) >= 304


def test_a_stream_tells_it_with_the_finish_reason(parted: Parted):
    asked = {**fresh(TEXT, "streamed "), "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
    events = ask(parted.prefill, "/v1/completions", asked, kv_transfer_params=ASK).text
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    [last] = [chunk for chunk in chunks if "kv_transfer_params" in chunk]
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["kv_transfer_params"]["kv_pool"]["num_tokens"] >= 304


def test_a_second_server_that_is_asked_first_computes_by_itself(parted: Parted):
    asked = fresh(TEXT, "first ")
    told = computed(parted.prefill, fresh(TEXT, "other "))
    of_a_connector = {
        "do_remote_prefill": False,
        "remote_request_id": "cmpl-1",
        "tp_size": 2,
    }  # keys of vLLM's connectors, without effect here
    for params in (None, {}, of_a_connector, told):
        answer = ask(parted.decode, "/v1/completions", asked, kv_transfer_params=params)
        assert choices(answer) == choices(ask(parted.lone, "/v1/completions", asked))


def test_several_prompts_are_given_together(parted: Parted):
    body = {**TEXT, "prompt": ["one " + PROMPT, "two " + PROMPT]}
    assert computed(parted.prefill, body)["kv_pool"]["num_tokens"] >= 2 * 304


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pool": "another"}, "kv_transfer_params.kv_pool.pool: the blocks are of pool 'another', this server has "),
        ({"model": "other"}, "kv_transfer_params.kv_pool.model: the blocks are of model 'other', this server has "),
        ({"layout": "x"}, "kv_transfer_params.kv_pool.layout: the blocks are of layout 'x', this server has "),
        ({"block_size": 4}, "kv_transfer_params.kv_pool.block_size: the blocks are of block_size 4, this server has "),
        ({"block_size": 0}, "kv_transfer_params.kv_pool.block_size: expected `int` >= 1"),
        ({"backend": "nixl"}, "kv_transfer_params.kv_pool.backend: invalid enum value 'nixl'"),
        ({"pool": "x" * 300}, "kv_transfer_params.kv_pool.pool: expected `str` of length <= 256"),
    ],
)
def test_blocks_of_another_pool_or_model_are_refused_by_name(parted: Parted, change: Json, message: str):
    told = computed(parted.prefill, fresh(TEXT, "refused "))
    told["kv_pool"] |= change
    answer = ask(parted.decode, "/v1/completions", TEXT, kv_transfer_params=told)
    assert (answer.status_code, answer.json()["error"]["message"].startswith(message)) == (400, True), answer.text


@PATHS
@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"do_remote_decode": True, "do_remote_prefill": True},
            "kv_transfer_params: do_remote_decode and do_remote_pr",
        ),
        (
            {"do_remote_prefill": True, "remote_engine_id": "e"},
            "kv_transfer_params.kv_pool: is required with do_remote",
        ),
        ({"do_remote_decode": "yes"}, "kv_transfer_params.do_remote_decode: expected `bool | null`, got `str`"),
        ({"remote_port": 10**9}, "kv_transfer_params.remote_port: expected `int` <= 65535"),
        ({"remote_block_ids": [-1]}, "kv_transfer_params.remote_block_ids[0]: expected `int` >= 0"),
        ({"remote_host": "h" * 10_000}, "kv_transfer_params.remote_host: expected `str` of length <= 256"),
        ([], "kv_transfer_params: expected `object | null`, got `array`"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(parted: Parted, path: str, body: Json, params: Any, message: str):
    answer = ask(parted.decode, path, body, kv_transfer_params=params)
    assert (answer.status_code, answer.json()["error"]["message"][: len(message)]) == (400, message)


@PATHS
@pytest.mark.parametrize("params", [ASK, {"do_remote_prefill": True}])
def test_a_server_without_a_pool_says_so(parted: Parted, path: str, body: Json, params: Json):
    answer = ask(parted.lone, path, body, kv_transfer_params=params)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("kv_transfer_params: needs a KV pool: give kvPoolConfig")
    assert ask(parted.lone, path, body, kv_transfer_params={}).status_code == 200


def test_a_first_server_killed_between_the_two_costs_nothing(tmp_path: Path, parted: Parted):
    with AgentProcess(tmp_path / "ems.sock") as agent, pooled(tmp_path / "decode", agent.socket) as decode:
        asked = fresh(TEXT, "killed ")
        with pooled(tmp_path / "prefill", agent.socket) as prefill:
            told = computed(prefill, asked)
            prefill.process.kill()
        answer = ask(decode, "/v1/completions", asked, kv_transfer_params=told)
        assert choices(answer) == choices(ask(parted.lone, "/v1/completions", asked))
        assert num_cached(answer) >= 304
        agent.kill()  # the pool dies, too
        asked = fresh(TEXT, "gone ")
        answer = ask(decode, "/v1/completions", asked, kv_transfer_params=told)
        assert choices(answer) == choices(ask(parted.lone, "/v1/completions", asked))
