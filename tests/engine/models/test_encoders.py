"""BERT, RoBERTa and XLM-RoBERTa: the states and scores of transformers, whole steps, pairs told apart by types."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.contract.capabilities import check_capable
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest, ModelError
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.text.tokenizer import load_tokenizer
from kvloom.rank.loading import open_runner
from kvloom.rank.runner import ModelRunner
from tests.support.engine.engines import engine_over, run_all
from tests.support.lazily import lazily
from tests.support.models.checkpoints import VOCAB_SIZE, save
from tests.support.models.embedding import pooled, save_modules

transformers = lazily("transformers")

NOTHING = SamplingParams(max_tokens=0)
KINDS: dict[str, dict[str, str]] = {
    "reference": {"backend": "reference", "dtype": "float32"},
    "bf16": {"backend": "cpu", "weight_format": "bf16"},
    "w8a8": {"backend": "cpu", "weight_format": "w8a8"},
    "w4a8": {"backend": "cpu", "weight_format": "w4a8"},
}
TOLERANCES = {
    "reference": 2e-5,
    "bf16": 0.03,
    "w8a8": 0.06,
    "w4a8": 0.6,
}  # with random weights; unrelated vectors have distance 1.4
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": {"max_position_embeddings": 200, "pad_token_id": 0},
    "Roberta": {"max_position_embeddings": 202, "pad_token_id": 1, "type_vocab_size": 1},
    "XLMRoberta": {"max_position_embeddings": 202, "pad_token_id": 1, "type_vocab_size": 1},
}
SHAPE = {
    "hidden_size": 96,  # no multiple of 64, to which the kernels pad
    "intermediate_size": 168,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "vocab_size": VOCAB_SIZE,
    "initializer_range": 0.2,
}
PROMPTS = [
    tuple(torch.randint(2, VOCAB_SIZE, (n,), generator=torch.Generator().manual_seed(n)).tolist())
    for n in (1, 2, 16, 17, 70, 200)
]


def tiny_encoder(family: str, kind: str = "Model", **fields: Any) -> "transformers.PreTrainedModel":
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **FAMILIES[family], **fields})
    model = getattr(transformers, f"{family}{kind}")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def runner_of(path: Path, kind: str) -> ModelRunner:
    return open_runner(EngineConfig(model=str(path), num_blocks=60, **KINDS[kind]), [], lambda done, total: None)


def vectors(runner: ModelRunner, seconds: dict[int, int] | None = None, **fields: Any) -> list[torch.Tensor]:
    """The vectors of all PROMPTS, run together. `seconds`: by prompt, where the second of its two texts begins."""
    requests = [
        Request(str(i), ids, NOTHING, pooling=runner.info.pooling, second=(seconds or {}).get(i, 0))
        for i, ids in enumerate(PROMPTS)
    ]
    engine = engine_over(runner, **fields)
    found = run_all(engine, *requests)
    assert engine.stats().num_cached_blocks == 0
    return [torch.tensor(array("f", found[request.id][0].embedding or b"")) for request in requests]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_those_of_transformers_alone_and_in_company(family: str, pooling: str, tmp_path: Path):
    model = tiny_encoder(family)
    save_modules(save(model, tmp_path), pooling={"mean": "mean_tokens", "cls": "cls_token"}[pooling])
    with torch.no_grad():
        truths = [pooled(model(torch.tensor([ids])).last_hidden_state[0], pooling) for ids in PROMPTS]
    for kind, tolerance in TOLERANCES.items():
        runner = runner_of(tmp_path, kind)
        assert (runner.info.pooling, runner.info.max_seq_len, runner.info.hidden_size) == (pooling, 200, 96)
        together, alone = vectors(runner), vectors(runner, max_batch=1)
        for found, other, truth in zip(together, alone, truths, strict=True):
            assert torch.equal(found, other)
            assert float((found - truth).norm() / truth.norm()) < tolerance, kind


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_pairs_are_those_of_transformers(family: str, tmp_path: Path):
    model = tiny_encoder(family, "ForSequenceClassification", num_labels=1)
    save(model, tmp_path)
    seconds = {2: 5, 4: 33, 5: 1} if family == "Bert" else {}
    truths = []
    for i, ids in enumerate(PROMPTS):
        types = torch.tensor([[int(i in seconds and at >= seconds[i]) for at in range(len(ids))]])
        with torch.no_grad():
            truths.append(model(torch.tensor([ids]), token_type_ids=types).logits[0])
    for kind in ("reference", "bf16"):
        runner = runner_of(tmp_path, kind)
        assert (runner.info.pooling, runner.info.labels, runner.info.activation) == ("cls", ["LABEL_0"], "sigmoid")
        for found, truth in zip(vectors(runner, seconds), truths, strict=True):
            torch.testing.assert_close(found, truth, atol=2e-4 if kind == "reference" else 0.1, rtol=0)


def test_it_generates_nothing(tmp_path: Path):
    save(tiny_encoder("Bert"), tmp_path)
    with pytest.raises(BadRequest, match="its tokens see those behind them, it makes embeddings"):
        check_capable(runner_of(tmp_path, "bf16").info.lacks, Request("a", (1,), NOTHING), None)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported by bert; supported is gelu"),
        (
            {"position_embedding_type": "relative_key"},
            "position_embedding_type 'relative_key' is not supported by bert",
        ),
        ({"is_decoder": True}, "bert as a decoder is not supported"),
        ({"num_attention_heads": 7}, "hidden_size 96 is no multiple of num_attention_heads 7"),
        ({"max_position_embeddings": 512}, r"position_embeddings.weight has shape \[200, 96\]"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], problem: str, tmp_path: Path):
    save(tiny_encoder("Bert"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelError, match=problem):
        open_checkpoint(tmp_path)


def test_a_wordpiece_tokenizer_puts_two_texts_together_and_cuts_nothing(tmp_path: Path):
    words = {word: i for i, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "what", "is", "a", "cat", "##s"))}
    fast = tokenizers.Tokenizer(tokenizers.models.WordPiece(words, unk_token="[UNK]"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    fast.post_processor = tokenizers.processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    )
    fast.enable_truncation(4)
    fast.enable_padding(length=4)
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("what is a cats") == [2, 4, 5, 6, 7, 8, 3]
    assert tokenizer.encode_pair("what is", "a cats") == ([2, 4, 5, 3, 6, 7, 8, 3], 4)
