"""The other routes of Ollama's /api: load requests, refusals and errors in its format, models, embeddings."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvloom.checkpoints.facts import ModelFacts, facts_of
from kvloom.rank.fake import FakeRunner
from kvloom.server.serving.options import WireOptions
from tests.support.servers import MODEL, FakeServer, fake_server
from tests.support.wire.ollama import GREEDY, HELLO, error, lines, whole

KEY = "kvl-0123456789abcdef0123456789abcdef"

# -- load requests and refusals


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/api/chat", {}, "load"),
        ("/api/chat", {"messages": [], "keep_alive": "10m"}, "load"),
        ("/api/chat", {"messages": [], "keep_alive": 0}, "unload"),
        ("/api/generate", {}, "load"),
        ("/api/generate", {"prompt": "", "keep_alive": "0s"}, "unload"),
        ("/api/generate", {"prompt": "", "keep_alive": -1}, "load"),
    ],
)
def test_a_request_for_nothing_loads_or_unloads(server: FakeServer, path: str, body: dict[str, Any], reason: str):
    answer = server.post(path, {"model": MODEL, **body}).json()
    assert (answer["done"], answer["done_reason"]) == (True, reason)
    assert answer["message"] == {"role": "assistant", "content": ""} if "chat" in path else answer["response"] == ""
    assert server.client.get("/api/ps").json()["models"][0]["name"] == f"{MODEL}:latest"  # the model stays loaded


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]},
            "messages[0].images[0]: the model",
        ),
        ("/api/chat", {"messages": [{"role": "assistant", "content": "a"}]}, "messages: must hold one that is not"),
        ("/api/chat", {"messages": HELLO, "top_logprobs": 21}, "top_logprobs: expected"),
        ("/api/chat", {"messages": HELLO, "keep_alive": "soon"}, "keep_alive: must be a duration"),
        ("/api/chat", {"messages": HELLO, "think": "very"}, "think: invalid"),
        ("/api/chat", {"messages": HELLO, "shift": True}, "shift: is not supported"),
        ("/api/generate", {"prompt": "a", "images": ["aGk="]}, "images[0]: the model"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, "suffix: is not supported"),
        ("/api/generate", {"prompt": "a", "template": "{{ .Prompt }}"}, "template: is not supported"),
        ("/api/generate", {"prompt": "a", "raw": True, "system": "b"}, "system: is not supported with raw"),
        ("/api/generate", {"prompt": "a", "raw": True, "context": [1]}, "context: is not supported with raw"),
        ("/api/generate", {"prompt": "a", "context": [1, 258]}, "context[1]: is 258, outside the vocabulary of 258"),
        ("/api/generate", {"prompt": "a" * 5000}, "This model's maximum context length is"),
        ("/api/pull", {}, "pull: is not supported: this server's models are those it was started with"),
        ("/api/push", {}, "push: is not supported"),
        ("/api/create", {"from": MODEL}, "create: is not supported"),
        ("/api/copy", {"source": MODEL, "destination": "b"}, "copy: is not supported"),
        ("/api/blobs/sha256:00", {}, "blobs: is not supported"),
        ("/api/show", {"model": ""}, "model: is required"),
        ("/api/embed", {"input": ["a", ""]}, "input: must not be empty"),
        ("/api/embed", {"input": "a", "dimensions": 9}, "dimensions: must be at most 8"),
        (
            "/api/embed",
            {"input": "a" * 3000, "truncate": False},
            "This model's maximum context length is 2048 tokens. However, your input resulted in",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(server: FakeServer, path: str, body: dict[str, Any], problem: str):
    assert error(server, path, body).startswith(problem)


def test_deleting_and_unknown_routes_have_ollamas_errors(server: FakeServer):
    refused = server.client.request("DELETE", "/api/delete", json={"model": MODEL})
    assert (refused.status_code, list(refused.json())) == (400, ["error"])
    unknown = server.post("/api/nothing", {})
    assert (unknown.status_code, unknown.json()) == (404, {"error": "there is no route /api/nothing"})
    assert server.post("/api/chat", {}).json() == {"error": "model: is required"}
    broken = server.client.post("/api/chat", content=b'{"model": ')
    assert broken.status_code == 400
    assert broken.json()["error"].startswith("the body is not valid JSON")


def test_an_error_within_a_stream_is_a_line(monkeypatch: pytest.MonkeyPatch):
    run, steps = FakeRunner.run, []

    def failing(runner: FakeRunner, batch: Any) -> Any:
        steps.append(batch)
        if len(steps) == 5:
            raise RuntimeError("a kernel broke")
        return run(runner, batch)

    monkeypatch.setattr(FakeRunner, "run", failing)
    with fake_server() as server:
        first, *_, last = lines(server, "/api/chat", {"messages": HELLO})
    assert first["done"] is False
    assert list(last) == ["error"]


# -- models


def test_models_are_listed_with_their_tag_and_known_with_and_without_it(server: FakeServer):
    [model] = server.client.get("/api/tags").json()["models"]
    assert (model["name"], model["model"]) == (f"{MODEL}:latest",) * 2
    assert set(model) == {"name", "model", "modified_at", "size", "digest", "details"}
    assert len(model["digest"]) == 64
    [loaded] = server.client.get("/api/ps").json()["models"]
    assert loaded["digest"] == model["digest"]
    assert loaded["context_length"] == 2048
    for name in (MODEL, f"{MODEL}:latest"):
        assert whole(server, "/api/chat", {"model": name, "messages": HELLO, "options": GREEDY})["model"] == name
        shown = server.post("/api/show", {"model": name}).json()
        assert shown["capabilities"] == ["completion", "tools"]
        assert shown["model_info"][f"{shown['details']['family']}.context_length"] == 2048
    assert server.post("/api/show", {"name": MODEL}).status_code == 200


def test_a_model_that_is_not_there_is_not_found():
    with fake_server(options=WireOptions(validates_model=True)) as server:
        for path, body in (("/api/chat", {"messages": HELLO}), ("/api/embed", {"input": "a"}), ("/api/show", {})):
            text = error(server, path, {**body, "model": "other:7b"}, 404)
            assert text == "model 'other:7b' not found"


def test_a_model_is_told_of_by_its_files(smollm2_path: Path):
    facts = facts_of(smollm2_path)
    assert (facts.family, facts.format, facts.kind) == ("llama", "gguf", "Q4_1")
    assert 134_000_000 < facts.num_parameters < 136_000_000
    assert facts.num_bytes == smollm2_path.stat().st_size


def test_a_folder_is_told_of_by_its_headers(tmp_path: Path):
    tensors = {"a": torch.zeros(3, 5, dtype=torch.bfloat16), "b": torch.zeros(7)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    facts = facts_of(tmp_path)
    assert (facts.family, facts.format, facts.kind, facts.num_parameters) == ("qwen3", "safetensors", "BF16", 22)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    assert facts_of(tmp_path) == ModelFacts("qwen3")
    assert facts_of(tmp_path / "nothing") == ModelFacts()


def test_the_server_is_found_by_ollamas_signs(server: FakeServer):
    assert server.client.head("/").status_code == 200
    assert server.client.get("/").text == "Ollama is running"
    major, minor, _ = server.client.get("/api/version").json()["version"].split(".")
    assert (int(major), int(minor)) >= (0, 12)
    assert server.client.head("/api/version").status_code == 200


def test_keys_are_asked_for_in_ollamas_shape():
    with fake_server(keys=[KEY]) as server:
        refused = server.post("/api/chat", {"model": MODEL, "messages": HELLO})
        assert (refused.status_code, list(refused.json())) == (401, ["error"])
        header = {"Authorization": f"Bearer {KEY}"}
        assert server.post("/api/chat", {"model": MODEL, "messages": HELLO}, headers=header).status_code == 200


# -- embeddings


def test_embeddings_are_of_length_1_and_the_older_ones_as_they_are(server: FakeServer):
    answer = server.post("/api/embed", {"model": MODEL, "input": ["hi", "there"]}).json()
    openai = server.post("/v1/embeddings", {"model": MODEL, "input": ["hi", "there"]}).json()
    assert answer["embeddings"] == [entry["embedding"] for entry in openai["data"]]
    assert answer["prompt_eval_count"] == openai["usage"]["prompt_tokens"]
    [short] = server.post("/api/embed", {"model": MODEL, "input": "hi", "dimensions": 2}).json()["embeddings"]
    assert len(short) == 2
    older = server.post("/api/embeddings", {"model": MODEL, "prompt": "hi"}).json()["embedding"]
    scale = older[0] / answer["embeddings"][0][0]
    assert older == pytest.approx([value * scale for value in answer["embeddings"][0]])
    assert server.post("/api/embed", {"model": MODEL, "input": []}).json()["embeddings"] == []
    assert server.post("/api/embeddings", {"model": MODEL}).json() == {"embedding": []}


def test_a_text_that_is_too_long_to_embed_loses_its_end(server: FakeServer):
    long = server.post("/api/embed", {"model": MODEL, "input": "a" * 3000}).json()
    fitting = server.post("/api/embed", {"model": MODEL, "input": "a" * 2048}).json()
    assert long["embeddings"] == fitting["embeddings"]
    assert long["prompt_eval_count"] == 2048


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/api/chat", {}),
        ("/api/generate", {"prompt": "hi"}),
        ("/api/embed", {"input": "hi"}),
        ("/api/embeddings", {"prompt": "hi"}),
        ("/api/show", {}),
    ],
)
def test_the_default_model_answers_for_no_other(server: FakeServer, path: str, body: dict[str, Any]):
    refused = server.post(path, {"model": "llama9:1b", **body})
    assert (refused.status_code, refused.json()) == (404, {"error": "model 'llama9:1b' not found"})
