"""A server without torch: it answers, embeds, uses adapters, follows a schema and keeps prefixes in a pool."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvloom.checkpoints.checkpoint import open_checkpoint
from tests.support.configs import mock_document
from tests.support.models.adapters import make_adapter
from tests.support.pool.agents import running_agent
from tests.support.processes import CLI, ServeProcess, serving
from tests.support.waiting import until

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

# Python runs this at its start; it hides these packages as if they were not installed.
ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "safetensors", "transformers", "ml_dtypes"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""
MESSAGES = [
    {"role": "user", "content": "Write one sentence about the sea, and one about each of its five largest bays."}
]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
LONG = [
    {"role": "user", "content": " ".join(["The sea is wide and the bays are five."] * 20)}
]  # more than a block of 128


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("absent")
    (folder / "sitecustomize.py").write_text(ABSENT)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


@pytest.fixture(scope="module")
def server(
    smollm2_path: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("server")
    shapes = open_checkpoint(smollm2_path).spec.tensor_shapes()
    adapter = make_adapter(folder / "adapter", shapes, rank=4, size=0.3)
    with running_agent(pool_bytes=64 << 20, segment_bytes=32 << 20, slab_bytes=4 << 20) as agent:
        document = mock_document()
        document["ModelDeployParam"]["ModelParam"][0] |= {
            "modelInstanceType": "Standard",
            "modelName": "real",
            "modelWeightPath": str(smollm2_path),
        }
        document["ModelDeployParam"]["kvPoolConfig"] = {"backend": "ems", "socketPath": str(agent.config.socket)}
        (folder / "config.json").write_text(json.dumps(document))
        command = [*CLI, "serve", "--config", str(folder / "config.json"), "--port", "0"]
        with serving([*command, "--lora-modules", f"tuned={adapter}"], 120, **environment) as running:
            yield running


def post(server: ServeProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = httpx.post(server.url + path, json={"model": "real", **body}, timeout=120)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def chat(server: ServeProcess, **fields: Any) -> str:
    body = {"messages": MESSAGES, "max_tokens": 40, "temperature": 0, **fields}
    text: str = post(server, "/v1/chat/completions", body)["choices"][0]["message"]["content"]
    return text


def counted(server: ServeProcess, what: str) -> float:
    """The number of blocks that were saved to the pool ("saved") or loaded from it ("loaded")."""
    found = re.search(rf"^kv_tier_{what}_blocks_total\S* (\S+)", httpx.get(server.url + "/metrics").text, re.MULTILINE)
    assert found
    return float(found[1])


def test_it_answers_with_the_kernels(server: ServeProcess):
    assert "sea" in chat(server)
    loaded = Path(f"/proc/{server.rank_pid()}/maps").read_text()
    assert "libtorch" not in loaded
    assert "kernels" in loaded


def test_it_draws_with_every_rule(server: ServeProcess):
    rules = {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.3, "seed": 5, "logprobs": True, "top_logprobs": 3}
    assert chat(server, **rules) == chat(server, **rules) != chat(server)


def test_it_embeds(server: ServeProcess):
    answer = post(server, "/v1/embeddings", {"input": ["the sea", "the ocean"]})
    assert [len(item["embedding"]) for item in answer["data"]] == [576, 576]


def test_it_follows_a_schema(server: ServeProcess):
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    assert json.loads(chat(server, response_format=form)).keys() == {"city"}


def test_it_answers_with_an_adapter(server: ServeProcess):
    assert chat(server, model="tuned") != chat(server)


def test_what_the_pool_kept_is_not_computed_again(server: ServeProcess):
    saved = counted(server, "saved")
    first = chat(server, messages=LONG)
    until(lambda: counted(server, "saved") > saved)

    def ask_again() -> int:
        """The number of the prompt's tokens that were not computed. On a busy machine the pool may answer too late."""
        httpx.post(server.url + "/reset_prefix_cache", timeout=120).raise_for_status()
        answer = post(server, "/v1/chat/completions", {"messages": LONG, "max_tokens": 40, "temperature": 0})
        assert answer["choices"][0]["message"]["content"] == first
        cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached

    until(lambda: ask_again() > 0)
    assert counted(server, "loaded") > 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--backend", "reference"],
            "the torch backend needs torch, which is not installed; pip install 'kvloom[torch]'",
        ),
        (["--dtype", "float32"], "float32 needs torch, which is not installed; pip install 'kvloom[torch]'"),
        (["--device", "cuda"], "device: cuda needs torch, which is not installed; pip install 'kvloom[torch]'"),
    ],
)
def test_what_needs_torch_says_so_and_how_to_get_it(smollm2_path, environment, options, sentence):
    with (
        pytest.raises(AssertionError) as caught,
        serving([sys.executable, *CLI[1:], "serve", str(smollm2_path), "--port", "0", *options], 60, **environment),
    ):
        pass
    assert sentence in str(caught.value)
