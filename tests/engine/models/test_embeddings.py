"""Embeddings of models with weights: transformers' states, pooled; bit-identical however they are scheduled."""

import json
import re
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.embedding.pooling import gguf_pooling
from kvloom.checkpoints.embedding.prompts import message_form, prompts_of
from kvloom.contract.capabilities import check_capable
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest, ModelError
from kvloom.contract.pooling import POOLINGS, modes_of
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.gewu.protocol.messages import Open
from kvloom.gewu.worker.main import open_worker
from kvloom.rank.fake import ByteTokenizer
from kvloom.rank.loading import open_runner
from kvloom.rank.runner import ModelRunner
from tests.support.engine.engines import engine_over, run_all
from tests.support.engine.executors import opened
from tests.support.models.byte_folder import make_byte_folder
from tests.support.models.checkpoints import VOCAB_SIZE, save, tiny_model
from tests.support.models.embedding import pooled

NOTHING = SamplingParams(max_tokens=0)
PROMPTS = [
    tuple(torch.randint(0, VOCAB_SIZE, (n,), generator=torch.Generator().manual_seed(n)).tolist())
    for n in (1, 2, 16, 17, 70, 120)
]
REFERENCE = {"backend": "reference", "dtype": "float32"}
KERNELS = {"backend": "cpu", "weight_format": "bf16"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save(tiny_model("qwen3"), tmp_path_factory.mktemp("model"))  # heads of 32, which the kernels support


@pytest.fixture(scope="module", params=[REFERENCE, KERNELS], ids=["reference", "cpu"])
def runner(folder, request) -> ModelRunner:
    config = EngineConfig(model=str(folder), num_blocks=40, **request.param)
    return open_runner(config, [], lambda done, total: None)


@pytest.fixture(scope="module", params=[*POOLINGS, "mean+cls+last"])
def pooling(request) -> str:
    return request.param


def engine_of(runner: ModelRunner, **fields: object) -> Engine:
    return engine_over(runner, **fields)


def vectors(engine: Engine, pooling: str, tag: str = "") -> list[list[float]]:
    """The vectors of all PROMPTS, run together."""
    requests = [Request(f"{tag}{i}", ids, NOTHING, pooling=pooling) for i, ids in enumerate(PROMPTS)]
    found = run_all(engine, *requests)
    return [list(array("f", found[request.id][0].embedding or b"")) for request in requests]


def wanted(model: torch.nn.Module, pooling: str) -> list[torch.Tensor]:
    with torch.no_grad():
        states = [model.model(torch.tensor([ids])).last_hidden_state[0] for ids in PROMPTS]
    return [pooled(state, pooling) for state in states]


def test_they_are_the_states_of_transformers(runner: ModelRunner, pooling: str):
    got = vectors(engine_of(runner, enable_prefix_cache=False), pooling)
    tolerance = 2e-4 if runner.info.backend == "reference" else 0.05  # the kernels have bfloat16 weights and cache
    for ids, vector, truth in zip(PROMPTS, got, wanted(tiny_model("qwen3"), pooling), strict=True):
        assert len(vector) == runner.info.hidden_size * len(pooling.split("+")) == len(truth)
        difference = torch.tensor(vector) - truth
        assert float(difference.norm() / truth.norm()) < tolerance, len(ids)


@pytest.mark.parametrize("kind", [REFERENCE, KERNELS], ids=["reference", "cpu"])
def test_a_checkpoint_without_a_head_makes_embeddings_and_nothing_else(kind, tmp_path):
    model = tiny_model("qwen3")
    path = save(model.model, tmp_path)
    assert json.loads((path / "config.json").read_text(encoding="utf-8"))["architectures"] == ["Qwen3Model"]
    runner = open_runner(EngineConfig(model=str(path), num_blocks=40, **kind), [], lambda done, total: None)
    tolerance = 2e-4 if runner.info.backend == "reference" else 0.05
    for vector, truth in zip(vectors(engine_of(runner), "last"), wanted(model, "last"), strict=True):
        assert float((torch.tensor(vector) - truth).norm() / truth.norm()) < tolerance
    with pytest.raises(
        BadRequest, match="cannot do it: its checkpoint has no head for text, it makes embeddings"
    ) as caught:
        check_capable(runner.info.lacks, Request("a", (1,), NOTHING), None)
    assert caught.value.field == "prompt"
    check_capable(runner.info.lacks, Request("a", (1,), NOTHING, pooling="last"), None)
    with pytest.raises(BadRequest, match="its checkpoint has no head for text, it makes embeddings"):
        engine_of(runner).add(Request("text", PROMPTS[0], SamplingParams(max_tokens=1)))


def test_a_session_on_a_model_without_a_head_is_refused_while_it_loads(tmp_path):
    make_byte_folder(tmp_path)
    save(tiny_model("qwen3").model, tmp_path)
    with pytest.raises(ModelError, match="a session answers with text, and this model cannot: its checkpoint has no"):
        open_worker(Open(str(tmp_path), "cpu", 1 << 20, 64), lambda done, total: None)


def test_chunks_company_and_the_cache_do_not_show(runner: ModelRunner, pooling: str):
    """Bit for bit with the kernels; the reference's states differ by chunks in their last bits."""
    alone = vectors(engine_of(runner, enable_prefix_cache=False, max_batch=1), pooling)
    chunked = vectors(engine_of(runner, enable_prefix_cache=False, max_batch=4, max_tokens_per_step=7), pooling)
    cache = engine_of(runner, enable_prefix_cache=True)
    cold, warm = vectors(cache, pooling, "cold"), vectors(cache, pooling, "warm")
    tolerance = 1e-4 if runner.info.backend == "reference" else 0.0
    for other in (chunked, cold, warm):
        for got, want in zip(other, alone, strict=True):
            torch.testing.assert_close(torch.tensor(got), torch.tensor(want), atol=tolerance, rtol=0)
    hits = cache.stats().total_cached_tokens
    assert (hits > 0) == (pooling == "last")


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_two_ranks_give_the_vectors_of_one(folder: Path, pooling: str):
    found = []
    for world_size in (1, 2):
        config = EngineConfig(model=str(folder), num_blocks=64, world_size=world_size, **REFERENCE)
        with opened(config) as executor:
            found.append(torch.tensor(vectors(Engine(config, executor, ByteTokenizer()), pooling)))
    assert torch.allclose(*found, atol=1e-4, rtol=0)


def test_a_checkpoint_of_the_decoder_alone_is_read_too(tmp_path: Path):
    """Such a checkpoint, as sentence-transformers saves it, has tensors without the prefix "model." and no head."""
    model = tiny_model("qwen3", tie_word_embeddings=True)
    model.model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    runner = open_runner(EngineConfig(model=str(tmp_path), num_blocks=40, **REFERENCE), [], lambda done, total: None)
    for vector, truth in zip(vectors(engine_of(runner), "last"), wanted(model, "last"), strict=True):
        torch.testing.assert_close(torch.tensor(vector), truth, atol=2e-4, rtol=1e-4)


def modules(last: str) -> str:
    own = "sentence_transformers.models"
    kinds = [{"type": f"{own}.Transformer"}, {"type": f"{own}.Pooling", "path": "Y"}, {"type": last, "path": "Z"}]
    return json.dumps([{"idx": i, "name": str(i), **kind} for i, kind in enumerate(kinds)])


NORMALIZE = "sentence_transformers.base.modules.normalize.Normalize"
BOTH = '{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": true}'
OF_TEXTS = {  # what sentence-transformers 6.2 writes for a tokenizer without a chat template
    "transformer_task": "feature-extraction", "module_output_name": "token_embeddings",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
}  # fmt: skip
OF_MESSAGES = {**OF_TEXTS, "modality_config": {**OF_TEXTS["modality_config"], "message": {"method": "forward"}}}


@pytest.mark.parametrize(
    ("files", "pooling"),
    [
        ({}, "last"),
        ({"1_Pooling/config.json": '{"word_embedding_dimension": 64, "pooling_mode_lasttoken": true}'}, "last"),
        ({"1_Pooling/config.json": '{"pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true}'}, "mean"),
        ({"1_Pooling/config.json": '{"pooling_mode_max_tokens": true}'}, "max_tokens"),
        ({"1_Pooling/config.json": '{"pooling_mode_mean_tokens": true, "pooling_mode_lasttoken": true}'}, "mean+last"),
        ({"1_Pooling/config.json": BOTH}, "cls+mean"),
        ({"1_Pooling/config.json": '{"pooling_mode": ["mean", "cls"], "include_prompt": true}'}, "mean+cls"),
        ({"modules.json": modules(NORMALIZE), "Y/config.json": "{}"}, "mean"),
        ({"sentence_bert_config.json": '{"max_seq_length": 512, "do_lower_case": false}'}, "last"),
        ({"sentence_bert_config.json": json.dumps(OF_TEXTS)}, "last"),
        ({"sentence_bert_config.json": json.dumps(OF_MESSAGES)}, "last"),
        ({"config_sentence_transformers.json": '{"model_type": "SentenceTransformer"}'}, "last"),
        ({"config_sentence_transformers.json": '{"prompts": {"a": "b"}, "similarity_fn_name": "dot"}'}, "last"),
        ({"config_sentence_transformers.json": '{"model_type": "SparseEncoder"}'}, "last+SparseEncoder"),
        ({"modules.json": modules("own.Normalize"), "Y/config.json": '{"pooling_mode": "cls"}'}, "cls+own.Normalize"),
        ({"1_Pooling/config.json": '{"pooling_mode_cls_token": true}'}, "cls"),
        ({"1_Pooling/config.json": '{"pooling_mode": "mean"}'}, "mean"),
        ({"modules.json": modules("sentence_transformers.models.LSTM"), "Y/config.json": "{}"}, "mean+LSTM"),
        (
            {"modules.json": modules(NORMALIZE), "Y/config.json": '{"include_prompt": false}'},
            "mean+tokens behind the prompt alone",
        ),
    ],
)
def test_the_checkpoint_says_how_to_pool(folder: Path, tmp_path: Path, files: dict[str, str], pooling: str):
    found = open_checkpoint(beside(folder, tmp_path, files)).embedding
    assert (found.pooling, found.num_out) == (pooling, 64 * max(1, len(modes_of(pooling))))


@pytest.mark.parametrize(("num_kept", "length"), [(5, 5), (64, 64), (100, 64), (None, 64)])
def test_a_model_may_give_the_first_numbers_alone(folder: Path, tmp_path: Path, num_kept: int | None, length: int):
    """truncate_dim of sentence-transformers."""
    about = json.dumps({"truncate_dim": num_kept})
    found = open_checkpoint(beside(folder, tmp_path, {"config_sentence_transformers.json": about})).embedding
    state = np.arange(64, dtype=np.float32)
    assert found.num_out == length
    assert found.of(state).tolist() == state[:length].tolist()


@pytest.mark.parametrize(
    ("kind", "length", "context"),
    [("Qwen3Model", 100, 100), ("Qwen3Model", None, 256), ("Qwen3Model", 1000, 256), ("Qwen3ForCausalLM", 100, 256)],
)
def test_the_folder_says_how_long_a_text_may_be(
    folder: Path, tmp_path: Path, kind: str, length: int | None, context: int
):
    """max_seq_length of sentence-transformers; a model that also writes text has its whole context."""
    config = json.loads((folder / "config.json").read_text()) | {"architectures": [kind]}
    path = beside(folder, tmp_path, {"sentence_bert_config.json": json.dumps({"max_seq_length": length})})
    (path / "config.json").unlink()
    (path / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(path).spec.max_seq_len == context


def beside(folder: Path, tmp_path: Path, files: dict[str, str]) -> Path:
    """The folder with more files."""
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"1_Pooling/config.json": '{"field_of_2027": 1}'}, "1_Pooling/config.json: field_of_2027 is not supported"),
        ({"config_sentence_transformers.json": '{"field_of_2027": 1}'}, "transformers.json: field_of_2027 is not"),
        ({"config_sentence_transformers.json": '{"truncate_dim": -1}'}, "truncate_dim must be a positive whole number"),
        ({"1_Pooling/config.json": '{"pooling_mode": {"a": 1}}'}, "pooling_mode must be a name or a list of names"),
        ({"sentence_bert_config.json": '{"do_lower_case": true}'}, "do_lower_case is not supported, got True"),
        ({"sentence_bert_config.json": '{"transformer_task": "text-generation"}'}, "transformer_task is not supported"),
        (
            {"sentence_bert_config.json": '{"modality_config": {"message": {"format": "x"}}}'},
            "must be flat or structured",
        ),
        ({"modules.json": '[{"type": "a.B", "kwargs": ["task"]}]'}, "kwargs of a.B is not supported, got ['task']"),
        (
            {"modules.json": modules(NORMALIZE), "Y/config.json": "{}", "Z/config.json": '{"module_input_name": "x"}'},
            "Z/config.json: module_input_name is not supported, got 'x'",
        ),
    ],
)
def test_fields_that_are_not_known_are_refused_by_name(folder: Path, tmp_path: Path, files: dict[str, str], words: str):
    with pytest.raises(ModelError, match=re.escape(words)):
        open_checkpoint(beside(folder, tmp_path, files))


@pytest.mark.parametrize(
    ("kind", "pooling"), [(None, "last"), (0, "last"), (1, "mean"), (2, "cls"), (3, "last"), (4, "pooling_type 4")]
)
def test_a_gguf_file_says_so_by_a_number(kind: int | None, pooling: str):
    assert gguf_pooling(kind) == pooling


@pytest.mark.parametrize(
    ("config", "form"),
    [
        (None, ""),
        (OF_TEXTS, ""),
        ({"max_seq_length": 512}, ""),
        (OF_MESSAGES, "flat"),
        ({"modality_config": {"message": {"format": "structured"}}}, "structured"),
    ],
)
def test_whether_texts_are_messages_is_said_beside_the_model(tmp_path: Path, config: Any, form: str):
    if config is not None:
        (tmp_path / "sentence_bert_config.json").write_text(json.dumps(config))
    assert message_form(tmp_path) == form


def test_the_prompts_of_a_folder_are_those_of_sentence_transformers(tmp_path: Path):
    assert prompts_of(tmp_path) == {}
    file = tmp_path / "config_sentence_transformers.json"
    file.write_text('{"prompts": {"query": "Query: ", "document": ""}, "default_prompt_name": null}')
    assert prompts_of(tmp_path) == {"query": "Query: ", "document": ""}
    file.write_text('{"prompts": {"query": 3}}')
    with pytest.raises(ModelError, match="prompts must be texts by name"):
        prompts_of(tmp_path)
