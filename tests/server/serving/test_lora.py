"""LoRA adapters over HTTP: loaded and unloaded while others run, chosen by name in every dialect."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import signal
from pathlib import Path

import httpx
import pytest

from kvloom.checkpoints.lora import read_adapter
from kvloom.contract.errors import BadRequest
from kvloom.contract.sampling import SamplingParams
from kvloom.rank.fake import ByteTokenizer, fake_answer
from kvloom.server.config.settings import load_settings
from kvloom.server.serving.options import WireOptions
from tests.support.configs import mock_document
from tests.support.lazily import lazily
from tests.support.models.adapters import TINY_SHAPES, make_adapter
from tests.support.processes import serve
from tests.support.servers import MODEL, FakeServer, fake_server
from tests.support.waiting import until

openai = lazily("openai")

PROMPT = "the quick brown fox"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("lora")
    for seed, name in enumerate(("sql", "poem", "code")):
        make_adapter(root / name, TINY_SHAPES, seed)
    return root


@pytest.fixture
def server(root):
    with fake_server(options=WireOptions(lora_root=root), step_s=0.001) as running:
        yield running


def load(server: FakeServer, name: str, path: str | None = None, **fields: object):
    return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path or name, **fields})


def unload(server: FakeServer, name: str):
    return server.post("/v1/unload_lora_adapter", {"lora_name": name})


def expected(root: Path, name: str | None, prompt: str = PROMPT, count: int = 12) -> str:
    digest = read_adapter(root / name, None).digest if name else ""
    ids = fake_answer(ByteTokenizer().encode(prompt), SamplingParams(temperature=0), 0, count, digest)
    return ByteTokenizer().decode(ids)


def complete(server: FakeServer, model: str, prompt: str = PROMPT) -> str:
    reply = server.post("/v1/completions", {"model": model, "prompt": prompt, **GREEDY})
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == model
    return reply.json()["choices"][0]["text"]


def test_an_adapter_is_loaded_listed_used_and_unloaded(server, root):
    reply = load(server, "sql")
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    cards = server.client.get("/v1/models").json()["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        (MODEL, MODEL, None),
        ("sql", "sql", MODEL),
    ]
    assert server.client.get("/v1/models/sql").json() == cards[1]
    assert complete(server, "sql") == expected(root, "sql") != expected(root, None)
    assert complete(server, MODEL) == expected(root, None)
    reply = unload(server, "sql")
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert [card["id"] for card in server.client.get("/v1/models").json()["data"]] == [MODEL]


def test_every_dialect_chooses_the_adapter_by_name(server, root):
    load(server, "sql")
    text = expected(root, "sql")
    greedy = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    assert server.post("/generate", {"model": "sql", "prompt": PROMPT, **greedy}).json()["text"] == [PROMPT + text]
    parameters = {"max_new_tokens": 3}
    path = "/v2/models/sql/generate"
    assert server.post(path, {"text_input": PROMPT, "parameters": parameters}).json()["text_output"] == text[:3]
    tgi = {"inputs": PROMPT, "parameters": {**parameters, "adapter_id": "sql"}}
    assert server.post("/generate", tgi).json()["generated_text"] == text[:3]
    assert server.post("/", tgi).json()[0]["generated_text"] == text[:3]
    assert server.post("/infer", tgi).json()["generated_text"] == text[:3]
    wrong = {"inputs": PROMPT, "parameters": {"adapter_id": "other"}}
    assert server.post("/generate", wrong).status_code == 404
    mixed = {"text_input": PROMPT, "parameters": {"adapter_id": "poem"}}
    assert "adapter_id" in server.post(path, mixed).json()["error"]


def test_the_openai_client_chooses_among_adapters(server, root):
    for name in ("sql", "poem"):
        load(server, name)
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL, "sql", "poem"]
        for name in (None, "sql", "poem"):
            stream = client.completions.create(
                model=name or MODEL, prompt=PROMPT, temperature=0, max_tokens=12, stream=True, extra_body=GREEDY
            )
            assert "".join(chunk.choices[0].text for chunk in stream) == expected(root, name)
        unload(server, "sql")
        with pytest.raises(openai.NotFoundError, match="the model 'sql' does not exist"):
            client.completions.create(model="sql", prompt=PROMPT)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"lora_name": ""}, "lora_name", "must be 1 to 128 letters"),
        ({"lora_name": "a b"}, "lora_name", "must be 1 to 128 letters"),
        ({"lora_name": MODEL}, "lora_name", "is the name of a model"),
        ({"lora_name": "taken"}, "lora_name", "is loaded already"),
        ({"lora_path": "nowhere"}, "lora_path", "nowhere is neither a folder nor a .gguf file"),
        ({"lora_path": "sql/adapter_config.json"}, "lora_path", "is neither a folder"),
        ({"lora_path": "../elsewhere"}, "lora_path", "must lead to a folder below loraRoot"),
        ({"lora_path": "/etc"}, "lora_path", "must lead to a folder below loraRoot"),
        ({"lora_path": "out"}, "lora_path", "must lead to a folder below loraRoot"),
        ({"lora_path": "out_file"}, "lora_path", "must lead to a folder below loraRoot"),
        ({"lora_path": "x\0y"}, "lora_path", "is no path"),
        ({"lora_path": "empty"}, "lora_path", "adapter_config.json cannot be read: No such file"),
        ({"lora_path": 3}, "lora_path", "expected `str`"),
        ({"base_model_name": "other"}, "base_model_name", "the model 'other' does not exist"),
        ({"base_model_name": "taken"}, "base_model_name", "is an adapter, not a model"),
    ],
)
def test_what_cannot_be_loaded_is_a_400_that_names_the_field(server, root, tmp_path, fields, param, words):
    elsewhere = make_adapter(tmp_path / "elsewhere", TINY_SHAPES)
    (root / "empty").mkdir(exist_ok=True)
    for link in (root / "out", root / "out_file" / "adapter_model.safetensors"):
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
    (root / "out").symlink_to(elsewhere)
    (root / "out_file" / "adapter_model.safetensors").symlink_to(elsewhere / "adapter_model.safetensors")
    load(server, "taken", "poem")
    reply = server.post("/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "sql", **fields})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert words in reply.json()["error"]["message"]
    assert [card["id"] for card in server.client.get("/v1/models").json()["data"]] == [MODEL, "taken"]


def test_without_a_root_nothing_is_loaded(root):
    with fake_server() as server:
        reply = load(server, "sql", str(root / "sql"))
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "lora_path")
        assert "--lora-root" in reply.json()["error"]["message"]


def test_the_routes_ask_for_an_api_key_as_all_do(root):
    key = "kvl-" + "k" * 32
    with fake_server(options=WireOptions(lora_root=root), keys=[key]) as server:
        assert load(server, "sql").status_code == unload(server, "sql").status_code == 401
        server.client.headers["Authorization"] = f"Bearer {key}"
        assert load(server, "sql").status_code == 200


@pytest.mark.parametrize("validates", [False, True])
def test_an_unloaded_name_is_404_even_where_the_default_answers_for_unknown_ones(root, validates):
    with fake_server(options=WireOptions(validates_model=validates, lora_root=root)) as server:
        body = {"model": "sql", "prompt": PROMPT, **GREEDY}
        assert server.post("/v1/completions", body).status_code == (404 if validates else 200)
        load(server, "sql")
        unload(server, "sql")
        reply = server.post("/v1/completions", body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
        assert unload(server, "sql").status_code == unload(server, MODEL).status_code == 404
        load(server, "sql")
        assert complete(server, "sql") == expected(root, "sql")


def test_a_stream_outlives_the_unloading_and_the_replacement_of_its_adapter(server, root):
    load(server, "a", "sql")
    for change in (lambda: load(server, "a", "poem", load_inplace=True), lambda: unload(server, "a")):
        name = "sql" if complete(server, "a") == expected(root, "sql") else "poem"
        body = {"model": "a", "prompt": PROMPT, **GREEDY, "max_tokens": 60, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            first = next(line for line in lines if line)
            assert change().status_code == 200
            events = [first, *(line for line in lines if line)]
        assert events[-1] == "data: [DONE]"
        texts = [json.loads(text.removeprefix("data: "))["choices"][0] for text in events[:-1]]
        assert "".join(choice["text"] for choice in texts) == expected(root, name, count=60)
        assert [choice["finish_reason"] for choice in texts if choice["finish_reason"]] == ["length"]
    assert server.post("/v1/completions", body).status_code == 404


@pytest.mark.parametrize("change", [load, unload], ids=["replaced", "unloaded"])
def test_whoever_waits_for_a_slot_gets_the_adapter_that_it_asked_for(root, change):
    with fake_server(1, options=WireOptions(lora_root=root), step_s=0.01) as server:
        load(server, "a", "sql")
        with concurrent.futures.ThreadPoolExecutor() as pool:
            before = pool.submit(server.complete, PROMPT, **{**GREEDY, "max_tokens": 60})
            until(lambda: server.admission.num_active == 1)
            waiting = pool.submit(complete, server, "a")
            until(lambda: server.admission.num_waiting == 1)
            fields = {"path": "poem", "load_inplace": True} if change is load else {}
            assert change(server, "a", **fields).status_code == 200
            assert server.admission.num_waiting == 1
            assert before.result().status_code == 200
            assert waiting.result() == expected(root, "sql")
        until(lambda: len(server.engine._engine.adapters._loaded) == (change is load))


def test_a_beam_search_keeps_its_adapter_to_its_end(root):
    with fake_server(options=WireOptions(lora_root=root), step_s=0.01) as server:
        load(server, "a", "sql")
        body = {"model": "a", "prompt": PROMPT, "use_beam_search": True, "temperature": 0, "n": 2, "max_tokens": 30}
        alone = server.post("/generate", body).json()
        with concurrent.futures.ThreadPoolExecutor() as pool:
            searching = pool.submit(server.post, "/generate", body)
            until(lambda: server.admission.num_active == 1)
            assert unload(server, "a").status_code == 200
            assert server.admission.num_active == 1
            assert searching.result().json() == alone
        until(lambda: not server.engine._engine.adapters._loaded)


def test_a_mixed_load_of_three_adapters_and_the_base_answers_each_as_alone(server, root):
    names = [None, "sql", "poem", "code"]
    for name in names[1:]:
        load(server, name)
    jobs = [(names[i % 4], f"{PROMPT} {i // 8}") for i in range(32)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda job: complete(server, job[0] or MODEL, job[1]), jobs))
    assert texts == [expected(root, *job) for job in jobs]
    assert "mock" in server.client.get("/metrics").text
    assert 'model_name="sql"' not in server.client.get("/metrics").text  # counts are per model


def test_two_models_have_adapters_of_their_own(root):
    with fake_server(options=WireOptions(lora_root=root), names=(MODEL, "second")) as server:
        assert load(server, "sql", base_model_name="second").status_code == 200
        assert server.client.get("/v1/models/sql").json()["parent"] == "second"


def test_an_adapter_is_loaded_again_by_the_absolute_path(server, root):
    copy = shutil.copytree(root / "sql", root / "absolute", dirs_exist_ok=True)
    assert load(server, "sql", str(copy)).status_code == 200
    assert server.client.get("/v1/models/sql").json()["root"] == str(copy)


# -- adapters given at startup


def test_adapters_of_the_command_line_are_there_from_the_start_and_after_a_crash(root):
    options = ("--backend", "fake", "--lora-modules", f"sql={root / 'sql'}", "--lora-root", str(root))
    body = {"model": "sql", "prompt": PROMPT, **GREEDY}
    with serve(*options) as process, httpx.Client(base_url=process.url) as client:
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == [MODEL, "sql"]
        assert client.post("/v1/load_lora_adapter", json={"lora_name": "b", "lora_path": "poem"}).status_code == 200
        before = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        rank = process.rank_pid()
        os.kill(rank, signal.SIGKILL)
        until(lambda: process.num_restarts() == 1)
        until(lambda: client.get("/health").status_code == 200, 60)
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == before == expected(root, "sql")
        reply = client.post("/v1/completions", json={**body, "model": "b"})
        assert reply.json()["choices"][0]["text"] == expected(root, "poem")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("sql", 'loraModules: must be NAME=PATH, got "sql"'),
        ("=x", 'loraModules: must be NAME=PATH, got "=x"'),
        ("sql=nowhere", "loraModules: sql=nowhere: adapter_config.json cannot be read"),
        (f"{MODEL}=nowhere", "is the name of a model"),
        ("sql!=nowhere", "loraModules: sql!=nowhere: must be 1 to 128 letters, digits or any of _ - . : /"),
    ],
)
def test_a_wrong_adapter_of_the_start_ends_it_with_one_sentence(value, words):
    with pytest.raises(AssertionError) as caught, serve("--backend", "fake", "--lora-modules", value):
        pass
    assert words in str(caught.value)


@pytest.mark.parametrize("layout", [1, 2])
def test_the_configuration_names_adapters_relative_to_its_folder(tmp_path, layout):

    if layout == 1:
        document = mock_document()
        document["ModelDeployParam"]["ModelParam"][0]["loraModules"] = ["sql=adapters/sql"]
        document["OtherParam"]["ServeParam"]["loraRoot"] = "adapters"
    else:
        model = {"modelName": "m", "modelWeightPath": "m", "loraModules": ["sql=adapters/sql"]}
        document = {
            "ServerConfig": {"loraRoot": "adapters"},
            "BackendConfig": {"ModelDeployConfig": {"ModelConfig": [model]}},
        }
    settings = load_settings(_written(tmp_path, document))
    assert settings["lora_root"] == tmp_path / "adapters"
    assert settings["models"][0]["lora_modules"] == [("sql", tmp_path / "adapters/sql")]
    path = tmp_path / "config.json"
    right = path.read_text()
    for wrong, words in (('"sql"', "must be NAME=PATH"), ("[1]", "must be a list of which each is a text")):
        path.write_text(right.replace('"sql=adapters/sql"', wrong))
        with pytest.raises(BadRequest, match=f"loraModules: {words}"):
            load_settings(path)


def _written(folder: Path, document: dict) -> Path:

    path = folder / "config.json"
    path.write_text(json.dumps(document))
    path.chmod(0o600)
    return path
