"""Encoders (BERT, RoBERTa, NomicBERT, EuroBERT): the states and scores of transformers, pairs told apart by types."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.families import family_of
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
    "NomicBert": {"max_position_embeddings": 200, "pad_token_id": 0, "initializer_range": 0.1},
}
HEADLESS: dict[str, dict[str, Any]] = {  # families whose classifiers are not served
    "EuroBert": {
        "max_position_embeddings": 200,
        "initializer_range": 0.1,
        **{f"{name}_token_id": id for id, name in enumerate(("pad", "bos", "eos", "mask"))},
    }
}
NOMIC_2024: dict[str, Any] = {  # the configuration that its own code reads, of the sizes of SHAPE
    "architectures": ["NomicBertModel"], "vocab_size": VOCAB_SIZE, "type_vocab_size": 2, "layer_norm_epsilon": 1e-12,
    "n_embd": 96, "n_inner": 168, "n_layer": 3, "n_head": 3, "n_positions": 8192, "max_trained_positions": 200,
    "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None, "activation_function": "swiglu", "causal": False, "qkv_proj_bias": False,
    "mlp_fc1_bias": False, "mlp_fc2_bias": False, "prenorm": False, "use_rms_norm": False, "parallel_block": False,
}  # fmt: skip
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
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **(FAMILIES | HEADLESS)[family], **fields})
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
@pytest.mark.parametrize("family", FAMILIES | HEADLESS)
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
    seconds = {2: 5, 4: 33, 5: 1} if family in ("Bert", "NomicBert") else {}
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


def test_of_nomic_bert_the_configuration_of_its_own_code_is_read(tmp_path: Path):
    save_modules(save(tiny_encoder("NomicBert"), tmp_path), pooling="mean_tokens")
    wanted = open_checkpoint(tmp_path).spec
    (tmp_path / "config.json").write_text(json.dumps(NOMIC_2024))
    assert open_checkpoint(tmp_path).spec == wanted


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"moe_every_n_layers": 2, "qkv_proj_bias": True}, "moe_every_n_layers 2 is not supported by nomic-bert"),
        ({"rotary_emb_interleaved": True}, "rotary_emb_interleaved True is not supported by nomic-bert"),
        ({"rotary_scaling_factor": 2}, "rotary_scaling_factor 2 is not supported by nomic-bert"),
        ({"activation_function": "gelu"}, "hidden_act 'gelu' is not supported by nomic-bert"),
        ({"is_causal": True}, "nomic-bert with is_causal is not supported"),
        ({"n_head": 32}, "head_dim 3 is odd; rotary embedding pairs dimensions"),
        ({"layer_norm_epsilon": 0}, "configuration: layer_norm_eps must be positive, got 0.0"),
    ],
)
def test_of_nomic_bert_what_is_not_supported_is_named(change: dict[str, Any], problem: str):
    with pytest.raises(ModelError) as error:
        family_of("NomicBertModel", "m").spec({**NOMIC_2024, **change})
    assert str(error.value) == problem


@pytest.mark.parametrize("key", ["classifier_pooling", "clf_pooling"])
def test_classifiers_of_euro_bert_are_refused_by_name(key: str, tmp_path: Path):
    save(tiny_encoder("EuroBert", "ForSequenceClassification", num_labels=1), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["classifier_pooling"]
    (tmp_path / "config.json").write_text(json.dumps({**config, key: "late"}))
    with pytest.raises(ModelError) as error:
        open_checkpoint(tmp_path)
    assert str(error.value) == f"{tmp_path}: configuration: {key} is not supported, got 'late'"


@pytest.mark.parametrize("name", ["ModernBertModel", "JinaBertModel", "JinaEmbeddingsV3Model"])
def test_folders_of_other_encoders_are_refused_by_name(name: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    with pytest.raises(ModelError, match=rf"config.json: architecture '{name}' is not known; known are [^.]*$"):
        open_checkpoint(tmp_path)


def test_jina_3_as_its_own_code_saves_it_is_refused_by_its_positions(tmp_path: Path):
    save(tiny_encoder("XLMRoberta"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "position_embedding_type": "rotary"}))
    with pytest.raises(ModelError) as error:
        open_checkpoint(tmp_path)
    problem = "position_embedding_type 'rotary' is not supported by roberta; supported is absolute"
    assert str(error.value) == f"{tmp_path}: {problem}"


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
