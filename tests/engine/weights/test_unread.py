"""Tensors that nothing reads are told; a head that differs from the embedding is used although it should be tied."""

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.unread import is_harmless, told
from kvloom.contract.config import EngineConfig
from kvloom.rank.kernels.reference import ReferenceBackend
from kvloom.rank.loading import open_runner
from tests.support.lazily import lazily
from tests.support.models.checkpoints import TINY_MODELS, run_step, save, tiny_model

from .test_families import FILES, write

transformers = lazily("transformers")

TOKENS = [5, 9, 1, 77, 30, 2, 2, 101]
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def with_tensors(folder, more, begin=""):
    """A tiny Qwen2 with tied embeddings; `more`: from its tensors to others."""
    save(tiny_model("qwen2", tie_word_embeddings=True), folder, "1GB")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    assert HEAD not in tensors
    own = tensors | more(tensors)
    save_file({f"{begin}{key}": value.contiguous() for key, value in own.items()}, path, {"format": "pt"})
    return folder


@pytest.mark.parametrize("name", TINY_MODELS)
def test_of_a_model_of_each_family_every_tensor_is_read(name, tmp_path):
    assert open_checkpoint(save(tiny_model(name), tmp_path)).unread == ()


@pytest.mark.parametrize("name", ["gemma3", "granite moe", "gpt-oss"])
def test_and_of_its_file(name, tmp_path):
    arch, metadata, fields = FILES[name]
    metadata = {f"{arch}__{key}": value for key, value in metadata.items()}
    path = write(tmp_path / "m.gguf", tiny_model(name, **fields), arch, **metadata)
    assert open_checkpoint(path).unread == ()


def test_a_head_that_differs_from_the_embedding_is_used_although_the_configuration_ties_them(tmp_path):
    folder = with_tensors(tmp_path, lambda t: {HEAD: t[EMBED].flip(0)})
    checkpoint = open_checkpoint(folder)
    with torch.no_grad():
        wanted = transformers.Qwen2ForCausalLM.from_pretrained(folder)(torch.tensor([TOKENS])).logits[0]
    found = run_step(ReferenceBackend(checkpoint.spec, checkpoint.weights, 4), [TOKENS], [[2]])
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
    assert (checkpoint.spec.tie_embeddings, checkpoint.unread) == (False, ())


def test_also_that_of_a_model_that_reads_pictures(tmp_path):
    folder = with_tensors(tmp_path, lambda t: {HEAD: t[EMBED].flip(0)}, "language_model.")
    checkpoint = open_checkpoint(folder)
    head, embed = (torch.tensor(checkpoint.weights.tensor(name).float32()) for name in ("head", "embed"))
    assert torch.equal(head, embed.flip(0))


@pytest.mark.parametrize(
    ("more", "is_tied"),
    [
        (lambda t: {HEAD: t[EMBED].clone()}, True),
        (lambda t: {HEAD: t[EMBED].to(torch.bfloat16)}, False),
        (lambda t: {HEAD: torch.cat([t[EMBED][:-1], t[EMBED][-1:] + 1])}, False),
    ],
)
def test_the_same_head_is_held_once(tmp_path, more, is_tied):
    checkpoint = open_checkpoint(with_tensors(tmp_path, more))
    assert (checkpoint.spec.tie_embeddings, checkpoint.unread) == (is_tied, ())


def test_tensors_that_nothing_reads_are_told_in_one_line(tmp_path, caplog):
    names = [f"model.layers.{index}.self_attn.o_proj.bias" for index in range(2)]
    names += ["model.layers.0.self_attn.q_norm.weight", "model.layers.0.mlp.shared.weight"]
    folder = with_tensors(tmp_path, lambda t: {name: torch.ones(3) for name in names})
    with caplog.at_level(logging.WARNING):
        open_runner(EngineConfig(model=str(folder), num_blocks=8, backend="reference"), [], lambda done, total: None)
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == f"{folder}: has {told(sorted(names))}"
    assert told(sorted(names)).endswith(" and 1 more")


def test_what_changes_nothing_is_not_told(tmp_path):
    layer = "model.layers.0.self_attn"
    names = [f"{layer}.rotary_emb.inv_freq", f"{layer}.k_scale", "mtp.layers.0.x", "model.vision_tower.x"]
    zero = {f"{layer}.o_proj.bias": torch.zeros(64)}
    assert open_checkpoint(with_tensors(tmp_path, lambda t: zero | {n: torch.ones(3) for n in names})).unread == ()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.self_attn.q_proj.input_scale", True),
        ("model.layers.3.self_attn.q_proj.weight_shape", True),
        ("blk.30.nextn.eh_proj.weight", True),
        ("rope_freqs.weight", True),
        ("pooler.dense.bias", True),
        ("multi_modal_projector.mm_soft_emb_norm.weight", True),
        ("model.layers.3.self_attn.q_proj.weight_global_scale", False),
        ("model.layers.3.self_attn.q_proj.qweight", False),
        ("blk.3.attn_q.bias", False),
        ("score.weight", False),
    ],
)
def test_harmless_names(name, expected):
    assert is_harmless(name) is expected


def test_how_they_are_told():
    assert told([]) == ""
    assert told(["a"]) == "a tensor that is not read: a"
    assert told(["a", "b"]) == "tensors that are not read: a, b"


@pytest.mark.parametrize(("guessing", "unread"), [(0, ("model.layers.2.self_attn.q_proj.weight",)), (1, ())])
def test_layers_that_guess_further_tokens_are_told_only_where_nothing_says_that_there_are_some(
    guessing, unread, tmp_path
):
    folder = save(tiny_model("glm4 moe, groups, biases", num_nextn_predict_layers=guessing), tmp_path, "1GB")
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"model.layers.2.self_attn.q_proj.weight": torch.ones(8, 8)}, path, {"format": "pt"})
    assert open_checkpoint(folder).unread == unread
