"""Classification heads: the numbers of transformers, from decoders of several families."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.embedding.classes import activation_of, labels_of
from kvloom.contract.capabilities import check_capable
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest, ModelError
from kvloom.contract.pooling import scores
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.rank.loading import open_runner
from kvloom.rank.runner import ModelRunner
from tests.support.engine.engines import engine_over, run_all
from tests.support.lazily import lazily
from tests.support.models.checkpoints import BASE, VOCAB_SIZE, save

transformers = lazily("transformers")

NOTHING = SamplingParams(max_tokens=0)
REFERENCE = {"backend": "reference", "dtype": "float32"}
KERNELS = {"backend": "cpu", "weight_format": "bf16"}
FAMILIES = ("Qwen3", "Qwen2", "Llama", "Mistral", "Gemma2", "Gemma3Text")
NAMES = {0: "bad", 1: "so-so", 2: "good"}
PROMPTS = [
    tuple(torch.randint(1, VOCAB_SIZE, (n,), generator=torch.Generator().manual_seed(n)).tolist())
    for n in (1, 2, 17, 70)
]


def tiny_classifier(family: str, **fields: Any) -> "transformers.PreTrainedModel":
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**BASE, "head_dim": 32, "id2label": NAMES, **fields})
    return getattr(transformers, f"{family}ForSequenceClassification")(config).eval()


def runner_of(path: Path, kind: dict[str, str]) -> ModelRunner:
    return open_runner(EngineConfig(model=str(path), num_blocks=40, **kind), [], lambda done, total: None)


def numbers(runner: ModelRunner, **fields: Any) -> list[torch.Tensor]:
    requests = [Request(str(i), ids, NOTHING, pooling=runner.info.pooling) for i, ids in enumerate(PROMPTS)]
    found = run_all(engine_over(runner, **fields), *requests)
    return [torch.tensor(array("f", found[request.id][0].embedding or b"")) for request in requests]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_over_a_decoder_gives_the_numbers_of_transformers(family: str, tmp_path: Path):
    model = tiny_classifier(family)
    save(model, tmp_path)
    with torch.no_grad():
        truths = [model(torch.tensor([ids])).logits[0] for ids in PROMPTS]
    for kind, tolerance in ((REFERENCE, 1e-4), (KERNELS, 0.1)):
        runner = runner_of(tmp_path, kind)
        assert (runner.info.labels, runner.info.hidden_size) == (list(NAMES.values()), 3)
        together, alone = numbers(runner), numbers(runner, max_batch=1, max_tokens_per_step=1000)
        for found, other, truth in zip(together, alone, truths, strict=True):
            assert torch.equal(found, other)
            assert float((found - truth).norm() / truth.norm()) < tolerance, (family, kind)


def test_it_labels_texts_and_nothing_else(tmp_path: Path):
    save(tiny_classifier("Qwen3", num_labels=1, id2label={0: "LABEL_0"}), tmp_path)
    runner = runner_of(tmp_path, REFERENCE)
    assert (runner.info.labels, runner.info.activation) == (["LABEL_0"], "sigmoid")
    with pytest.raises(BadRequest, match="its checkpoint has no head for text, it labels texts"):
        check_capable(runner.info.lacks, Request("a", (1,), NOTHING), None)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "id2label must name labels by numbers from 0 on"),
        ({"id2label": {"0": "a"}}, r"score.weight has shape \[3, 64\], the configuration asks for \[1, 64\]"),
        (
            {"architectures": ["MambaForSequenceClassification"]},
            "'MambaForSequenceClassification' is not known; .*--backend vllm",
        ),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.ReLU"}},
            "activation_fn must be one of Identity, Sigmoid, Softmax",
        ),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], problem: str, tmp_path: Path):
    save(tiny_classifier("Qwen3"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelError, match=problem):
        open_checkpoint(tmp_path)


TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}
OF_TEXTS = {
    "transformer_task": "sequence-classification", "module_output_name": "scores",
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
}  # fmt: skip
ABOUT = {
    "model_type": "CrossEncoder", "prompts": {}, "default_prompt_name": None,
    "__version__": {"sentence_transformers": "6.2.0"},
}  # fmt: skip


@pytest.mark.parametrize(("named", "activation"), [("torch.nn.modules.linear.Identity", "identity"), (None, "sigmoid")])
def test_a_cross_encoder_of_sentence_transformers_6_names_its_activation_beside_the_model(tmp_path, named, activation):
    folder = save(tiny_classifier("Qwen3", num_labels=1, id2label={0: "LABEL_0"}), tmp_path)
    files = {"modules": [TRANSFORMER], "sentence_bert_config": OF_TEXTS}
    for name, value in {**files, "config_sentence_transformers": {**ABOUT, "activation_fn": named}}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    assert open_checkpoint(folder).embedding.activation == activation


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("modules", [TRANSFORMER, {"type": "sentence_transformers.models.LSTM"}], "makes its scores with LSTM, which"),
        ("config_sentence_transformers", {"model_type": "SparseEncoder"}, "makes its scores with SparseEncoder, which"),
        ("sentence_bert_config", {"modality_config": {"message": {}}}, "with texts as messages of the chat template"),
        ("sentence_bert_config", {"transformer_task": "any-to-any"}, "transformer_task is not supported"),
        ("config_sentence_transformers", {"activation_fn": "torch.nn.ReLU"}, "activation_fn must be one of Identity"),
    ],
)
def test_scores_that_are_made_otherwise_are_refused(tmp_path, name, value, problem):
    folder = save(tiny_classifier("Qwen3"), tmp_path)
    (folder / f"{name}.json").write_text(json.dumps(value))
    with pytest.raises(ModelError, match=problem):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("config", "count", "activation"),
    [
        ({}, 1, "sigmoid"),
        ({}, 3, "softmax"),
        ({"problem_type": "regression"}, 1, "identity"),
        ({"problem_type": "multi_label_classification"}, 3, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, 1, "identity"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, 1, "sigmoid"),
    ],
)
def test_what_makes_scores_of_its_numbers(config: dict[str, Any], count: int, activation: str):
    assert activation_of(config, count) == activation


def test_labels_are_in_the_order_of_their_numbers():
    named = {str(index): f"label {index}" for index in reversed(range(12))}
    assert labels_of({"id2label": named}) == tuple(f"label {index}" for index in range(12))


def test_labels_without_names_are_numbered():
    assert labels_of({}) == ("LABEL_0", "LABEL_1")


def test_scores_are_those_of_torch_and_cannot_overflow():
    numbers = [-3.0, 0.5, 800.0]
    assert scores(numbers, "softmax") == pytest.approx(torch.tensor(numbers).softmax(0).tolist())
    assert scores([-800.0, *numbers], "sigmoid") == pytest.approx(torch.tensor([-800.0, *numbers]).sigmoid().tolist())
    assert scores(numbers, "identity") == numbers
