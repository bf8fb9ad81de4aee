"""Models with bidirectional attention: whole prompts, no cached blocks, and the vectors of transformers."""

import json
import shutil
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.embedding.dense import dense_of_folder
from kvloom.contract.capabilities import check_capable
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest, ModelError
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.rank.loading import open_runner
from kvloom.rank.runner import ModelRunner
from tests.engine.weights.test_gguf import write
from tests.support.engine.engines import engine_over, run_all
from tests.support.models.checkpoints import VOCAB_SIZE, save, tiny_model
from tests.support.models.embedding import dense_layers, pooled, save_modules, tiny_gemma

NOTHING = SamplingParams(max_tokens=0)
REFERENCE = {"backend": "reference", "dtype": "float32"}
KERNELS = {
    "bf16": {"backend": "cpu", "weight_format": "bf16"},
    "w8a8": {"backend": "cpu", "weight_format": "w8a8"},
    "w4a8": {"backend": "cpu", "weight_format": "w4a8"},
}
TOLERANCES = {"reference": 2e-5, "bf16": 0.03, "w8a8": 0.03, "w4a8": 0.3}
PROMPTS = [
    tuple(torch.randint(1, VOCAB_SIZE, (n,), generator=torch.Generator().manual_seed(n)).tolist())
    for n in (1, 2, 7, 16, 17, 70, 200, 256)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_modules(save(tiny_gemma(), tmp_path_factory.mktemp("gemma")), dense_layers())


def runner_of(path: Path, kind: str) -> ModelRunner:
    config = EngineConfig(model=str(path), num_blocks=64, **KERNELS.get(kind, REFERENCE))
    return open_runner(config, [], lambda done, total: None)


@pytest.fixture(scope="module", params=TOLERANCES)
def kind(request) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def runner(folder: Path, kind: str) -> ModelRunner:
    return runner_of(folder, kind)


def vectors(runner: ModelRunner, tag: str = "", **fields: Any) -> list[torch.Tensor]:
    """The vectors of all PROMPTS, run together."""
    engine = engine_over(runner, **fields)
    requests = [Request(f"{tag}{i}", ids, NOTHING, pooling=runner.info.pooling) for i, ids in enumerate(PROMPTS)]
    found = run_all(engine, *requests)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert engine.stats().num_cached_blocks == engine.stats().total_cached_tokens == 0
    return [torch.tensor(array("f", found[request.id][0].embedding or b"")) for request in requests]


def wanted() -> list[torch.Tensor]:
    model, dense = tiny_gemma(), dense_layers()
    with torch.no_grad():
        return [pooled(model(torch.tensor([ids])).last_hidden_state[0], "mean", dense) for ids in PROMPTS]


def test_embedding_gemma_gives_the_vectors_of_transformers(runner: ModelRunner, kind: str):
    assert (runner.info.pooling, runner.info.hidden_size) == ("mean", 64)
    for vector, truth in zip(vectors(runner), wanted(), strict=True):
        assert float((vector - truth).norm() / truth.norm()) < TOLERANCES[kind], kind


@pytest.mark.parametrize("limits", [{"max_batch": 1}, {"max_tokens_per_step": 64}, {"max_prefill_tokens": 20}])
def test_company_and_small_steps_do_not_show(runner: ModelRunner, limits: dict[str, int]):
    """Bit for bit: each prompt is computed whole, if necessary in a step of its own."""
    together, other = vectors(runner), vectors(runner, "other", **limits)
    assert all(torch.equal(*both) for both in zip(together, other, strict=True))


def test_it_makes_embeddings_and_nothing_else(folder: Path):
    lacks = runner_of(folder, "bf16").info.lacks
    for asked in (Request("a", (1,), NOTHING), Request("a", (1,), NOTHING, pooling="mean", gives_kv=True)):
        with pytest.raises(BadRequest, match="cannot do it: its tokens see those behind them"):
            check_capable(lacks, asked, None)
    check_capable(lacks, Request("a", (1,), NOTHING, pooling="mean"), None)


def test_a_prompt_longer_than_the_context_is_refused(folder: Path):
    engine = engine_over(runner_of(folder, "bf16"))
    with pytest.raises(BadRequest, match="has 257 tokens, but prompt and answer must fit in 256"):
        engine.add(Request("a", (5,) * 257, NOTHING, pooling="mean"))


def test_a_gguf_file_of_it_gives_the_same_vectors(tmp_path: Path):
    model, (wide, back) = tiny_gemma(), dense_layers()
    model.state_dict = lambda own=model.state_dict: {  # type: ignore[method-assign]
        **{f"model.{key}": value for key, value in own().items()},
        "dense_2.weight": wide.weight.data,
        "dense_3.weight": back.weight.data,
    }
    swa = {"attention__sliding_window": 12, "attention__sliding_window_pattern": [True, False, True]}
    metadata = {f"gemma-embedding.{key}": value for key, value in swa.items()}
    path = write(tmp_path / "m.gguf", model, "gemma-embedding", **metadata, **{"gemma-embedding.pooling_type": 1})
    for vector, truth in zip(vectors(runner_of(path, "reference")), wanted(), strict=True):
        assert float((vector - truth).norm() / truth.norm()) < TOLERANCES["reference"]


@pytest.mark.parametrize("num_out", [6, 5])
@pytest.mark.parametrize("activation", ["Identity", "Tanh"])
def test_a_dense_layer_may_add_what_it_is_given(tmp_path: Path, num_out: int, activation: str):
    """As sentence-transformers 6.2 saves Dense(..., use_residual=True): projected where the sizes differ."""
    torch.manual_seed(2)
    linear, residual = torch.nn.Linear(6, num_out), torch.nn.Linear(6, num_out, bias=False)
    tensors = {f"linear.{key}": value for key, value in linear.state_dict().items()}
    save_file(tensors | ({"residual.weight": residual.weight.data} if num_out != 6 else {}), tmp_path / "m.safetensors")
    places = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}
    config = {"in_features": 6, "out_features": num_out, "bias": True, "use_residual": True, **places}
    config["activation_function"] = f"torch.nn.modules.activation.{activation}"
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = torch.randn(6)
    with torch.no_grad():
        projected = linear(given) if activation == "Identity" else torch.tanh(linear(given))
        truth = projected + (given if num_out == 6 else residual(given))
    torch.testing.assert_close(torch.tensor(dense_of_folder(tmp_path, 6)(given.numpy())), truth)
    if num_out != 6:
        (tmp_path / "config.json").write_text(json.dumps({**config, "use_residual": False}))
        with pytest.raises(ModelError, match=r"has a tensor that is not read: residual\.weight"):
            dense_of_folder(tmp_path, 6)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: shutil.rmtree(folder / "3_Dense"), "3_Dense/config.json: no such file"),
        (lambda folder: (folder / "2_Dense" / "model.safetensors").unlink(), "2_Dense: holds no .safetensors file"),
        (lambda folder: (folder / "1_Pooling" / "config.json").unlink(), "1_Pooling/config.json: no such file"),
        (
            lambda folder: save_file({"linear.weight": torch.zeros(9, 64)}, folder / "2_Dense" / "model.safetensors"),
            r"linear.weight has shape \[9, 64\], the configuration asks for \[160, 64\]",
        ),
        (
            lambda folder: save_file({"weight": torch.zeros(9, 64)}, folder / "2_Dense" / "model.safetensors"),
            "tensor linear.weight is missing",
        ),
        (
            lambda folder: (folder / "2_Dense" / "config.json").write_text('{"in_features": 9, "out_features": 9}'),
            "2_Dense: in_features is 9, what it is given has 64 numbers",
        ),
        (
            lambda folder: (folder / "3_Dense" / "config.json").write_text(
                '{"in_features": 160, "out_features": 64, "bias": false, "activation_function": "torch.nn.ReLU"}'
            ),
            "3_Dense: activation_function 'ReLU' is not supported; supported are Identity, Tanh",
        ),
        (
            lambda folder: (folder / "3_Dense" / "config.json").write_text(
                '{"in_features": 160, "out_features": 64, "bias": false, "module_input_name": "token_embeddings"}'
            ),
            "3_Dense/config.json: module_input_name is not supported, got 'token_embeddings'",
        ),
        (lambda folder: (folder / "modules.json").write_text("[3]"), "cannot be read as a list of modules"),
    ],
)
def test_modules_that_are_missing_or_do_not_fit_are_named(folder: Path, tmp_path: Path, damage: Any, problem: str):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    damage(tmp_path)
    with pytest.raises(ModelError, match=problem):
        open_checkpoint(tmp_path)


def test_a_decoder_whose_configuration_says_that_it_is_not_causal_looks_both_ways(tmp_path: Path):
    model = tiny_model("qwen3").model
    save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "is_causal": False}))
    model.config.is_causal = False
    with torch.no_grad():
        truths = [model(torch.tensor([ids])).last_hidden_state[0].mean(0) for ids in PROMPTS]
    for vector, truth in zip(vectors(runner_of(tmp_path, "reference")), truths, strict=True):
        assert float((vector - truth).norm() / truth.norm()) < TOLERANCES["reference"]
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "is_causal": False, "sliding_window": 9, "use_sliding_window": True})
    )
    with pytest.raises(ModelError, match="is_causal false with a sliding_window is not supported"):
        open_checkpoint(tmp_path)
