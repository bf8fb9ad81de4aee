"""Encoders in GGUF files: the vectors of transformers, word pieces and scored pieces, what is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.contract.errors import ModelError
from kvloom.engine.text.tokenizer import load_tokenizer
from tests.engine.models.test_encoders import PROMPTS, TOLERANCES, runner_of, tiny_encoder, vectors
from tests.support.models.embedding import pooled

NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "encoder.layer": "blk",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
GATED_NAMES = {  # of NomicBERT and EuroBERT
    "layers.": "blk.",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_mlp_layernorm": "layer_output_norm",
}
ARCHITECTURES = {  # by model_type: in GGUF, and the names that differ
    "nomic_bert": ("nomic-bert", {**GATED_NAMES, "post_attention_layernorm": "attn_output_norm"}),
    "eurobert": (
        "eurobert",
        {
            **GATED_NAMES,
            "embed_tokens": "token_embd",
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
        },
    ),
}
POOLINGS = {"mean": 1, "cls": 2}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "what", "is", "a", "cat", "##s", "é", "cafe", "##!", "!"]


def marked(word: str) -> str:
    """As llama.cpp's converter writes it."""
    if word.startswith("["):
        return word
    return word[2:] if word.startswith("##") else f"▁{word}"


def tensors_of(model: Any) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Names and values as the converter writes them: NomicBERT's queries, keys and values are one matrix."""
    config = model.config
    _, names = ARCHITECTURES.get(config.model_type, ("bert", {}))
    fused = []
    for key, value in model.state_dict().items():
        if key.startswith("pooler"):
            continue
        for theirs, ours in (names | NAMES).items():
            key = key.replace(theirs, ours) if theirs.endswith(".") or f"{theirs}." in key else key
        key = f"output_{key}" if key == "norm.weight" else key
        data = value.numpy()
        if key.startswith("position_embd") and config.model_type != "bert":
            data = data[config.pad_token_id + 1 :]  # the converter leaves out those before the first in use
        if config.model_type == "nomic_bert" and key.endswith(("attn_q.weight", "attn_k.weight", "attn_v.weight")):
            fused.append(data)
            if key.endswith("attn_v.weight"):
                yield key.replace("attn_v", "attn_qkv"), np.concatenate(fused)
                fused = []
            continue
        yield key, data


def write(path: Path, model: Any = None, pooling: str = "mean", words: list[str] = WORDS, **metadata: Any) -> Path:
    """A transformers encoder as a GGUF file. `metadata`: more numbers and lists, by key."""
    arch, _ = ARCHITECTURES.get(model.config.model_type if model is not None else "", ("bert", {}))
    writer = gguf.GGUFWriter(path, arch)
    if model is not None:
        writer.add_block_count(model.config.num_hidden_layers)
        writer.add_context_length(512 if arch == "bert" else model.config.max_position_embeddings)
        writer.add_embedding_length(model.config.hidden_size)
        writer.add_feed_forward_length(model.config.intermediate_size)
        writer.add_head_count(model.config.num_attention_heads)
        if arch == "eurobert":
            writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
        else:
            writer.add_layer_norm_eps(model.config.layer_norm_eps)
        if arch != "bert":
            writer.add_rope_freq_base(model.config.rope_parameters["rope_theta"])
        writer.add_causal_attention(False)
        writer.add_uint32(f"{arch}.pooling_type", POOLINGS.get(pooling, 4))
    if words:
        writer.add_tokenizer_model("bert")
        writer.add_token_list([marked(word) for word in words])
        writer.add_token_types([3 if word.startswith("[") else 1 for word in words])
        ids = {f"tokenizer__ggml__{name}_token_id": id for name, id in (("unknown", 1), ("cls", 2), ("seperator", 3))}
        metadata = ids | metadata
    for key, value in metadata.items():
        if value is not None:
            add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
            (writer.add_array if isinstance(value, list) else add)(key.replace("__", "."), value)
    for key, data in tensors_of(model) if model is not None else ():
        writer.add_tensor(key, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", ["Bert", "XLMRoberta", "NomicBert", "EuroBert"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_are_those_of_transformers(family: str, pooling: str, tmp_path: Path):
    model = tiny_encoder(family)
    path = write(tmp_path / "m.gguf", model, pooling)
    with torch.no_grad():
        truths = [pooled(model(torch.tensor([ids])).last_hidden_state[0], pooling) for ids in PROMPTS]
    for kind in ("reference", "bf16"):
        runner = runner_of(path, kind)
        assert (runner.info.pooling, runner.info.max_seq_len, runner.info.hidden_size) == (pooling, 200, 96)
        for found, truth in zip(vectors(runner), truths, strict=True):
            assert float((found - truth).norm() / truth.norm()) < TOLERANCES[kind], kind
    assert open_checkpoint(path).unread == ()


def test_a_pooling_that_is_none_is_told(tmp_path: Path):
    path = write(tmp_path / "m.gguf", tiny_encoder("Bert"), "rank")
    assert open_checkpoint(path).embedding.pooling == "pooling_type 4"


def test_word_pieces_are_those_of_the_folder(tmp_path: Path):
    fast = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    fast.normalizer = tokenizers.normalizers.BertNormalizer()
    fast.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    fast.add_special_tokens([word for word in WORDS if word.startswith("[")])
    found = load_tokenizer(write(tmp_path / "m.gguf"))
    for text in ("What is a CATS", "café, is it?", "cat!", "", " a  [SEP] cats\n", "x" * 101):
        assert found.encode(text, add_special_tokens=False) == fast.encode(text, add_special_tokens=False).ids, text
    assert found.encode("a cats") == [2, 6, 7, 8, 3]
    assert found.encode_pair("what is", "a cats") == ([2, 4, 5, 3, 6, 7, 8, 3], 4)
    assert found.decode([6, 7, 8]) == "a cats"


def test_pieces_with_capital_letters_are_of_a_tokenizer_that_keeps_them(tmp_path: Path):
    cased = load_tokenizer(write(tmp_path / "m.gguf", words=[*WORDS, "Cat"]))
    assert cased.encode("Cat cat", add_special_tokens=False) == [13, 7]


def test_what_newer_converters_say_of_word_pieces_is_believed(tmp_path: Path):
    said = {"tokenizer__ggml__cls_token_id": None, "tokenizer__ggml__bos_token_id": 1}
    cased = {"tokenizer__ggml__normalizer__lowercase": False}
    kept = {"tokenizer__ggml__normalizer__lowercase": True, "tokenizer__ggml__normalizer__strip_accents": False}
    assert load_tokenizer(write(tmp_path / "bos.gguf", **said)).encode("a") == [1, 6, 3]
    assert load_tokenizer(write(tmp_path / "cased.gguf", **cased)).encode("a A") == [2, 6, 1, 3]
    assert load_tokenizer(write(tmp_path / "kept.gguf", **kept)).encode("É") == [2, 9, 3]


PIECES = ["<s>", "<pad>", "</s>", "<unk>", "▁a", "▁", "b", "▁ab", "c"]


def scored(path: Path, **metadata: Any) -> Path:
    fields = {"tokenizer__ggml__tokens": PIECES, "tokenizer__ggml__scores": [0.0] * 4 + [-1.0, -9.0, -2.0, -4.0, -3.0]}
    fields |= {"tokenizer__ggml__token_type": [3, 3, 3, 2, 1, 1, 1, 1, 1]}
    fields |= {f"tokenizer__ggml__{name}_token_id": id for name, id in (("bos", 0), ("eos", 2), ("unknown", 3))}
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_tokenizer_model("t5")
    for key, value in (fields | metadata).items():
        if value is not None:
            (writer.add_array if isinstance(value, list) else writer.add_uint32)(key.replace("__", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_scored_pieces_are_cut_where_the_sum_of_scores_is_highest(tmp_path: Path):
    found = load_tokenizer(scored(tmp_path / "m.gguf"))
    assert found.encode("ab abc") == [0, 4, 6, 4, 6, 8, 2]  # -1 - 2 is more than -4
    assert found.encode_pair("a", "ab") == ([0, 4, 2, 2, 4, 6, 2], 0)  # all tokens are of one type
    assert found.decode([4, 6, 7]) == "ab ab"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tokenizer__ggml__scores": [0.0]}, "tokenizer.ggml.scores must be a number for each of the 9 tokens"),
        ({"tokenizer__ggml__scores": None}, "tokenizer.ggml.scores must be a number for each of the 9 tokens"),
        ({"tokenizer__ggml__unknown_token_id": None}, "tokenizer.ggml.unknown_token_id is missing, or no token's"),
        ({"tokenizer__ggml__eos_token_id": 99}, "tokenizer.ggml.eos_token_id"),
    ],
)
def test_what_is_no_such_tokenizer_is_refused(change: dict[str, Any], problem: str, tmp_path: Path):
    with pytest.raises(ModelError, match=problem):
        load_tokenizer(scored(tmp_path / "m.gguf", **change))


@pytest.mark.parametrize("arch", ["nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "modern-bert"])
def test_other_encoders_are_refused_by_name(arch: str, tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", arch)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=f"m.gguf: architecture '{arch}' is not known; known are [^.]*$"):
        open_checkpoint(tmp_path / "m.gguf")
