"""Heads that guess, of folders and of GGUF files: what they compute is what plain torch does, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvloom.checkpoints import footprint
from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.guess_head import open_guess_head
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import ModelError
from kvloom.rank.kernels.backend import Head, Ragged
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions
from kvloom.rank.kernels.reference import ReferenceBackend, ReferenceOptions
from tests.support.models.checkpoints import save, tiny_model
from tests.support.models.guess_heads import FULL, GuessHead, save_with

from .test_families import QWEN_MOE
from .test_gguf import write

IDS = [3, 7, 9, 11, 50, 21, 22, 4, 90, 17]
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}
STATE = "linear_attention"
FILES = {
    "qwen3.5": ("qwen35", {}),
    "qwen3.5, a head of values each, tied": ("qwen35", {}),
    "qwen3.5 moe": ("qwen35moe", {**QWEN_MOE, "expert_shared_feed_forward_length": 72}),
    "qwen3 next": ("qwen3next", {**QWEN_MOE, "expert_shared_feed_forward_length": 72}),
}


def batch(before: torch.Tensor) -> Ragged:
    ends, table = np.array([0, len(IDS)], np.int32), np.array([[1, -1]], np.int32)
    ids, positions = np.array(IDS, np.int32), np.arange(len(IDS), dtype=np.int32)
    return Ragged(ids, positions, ends, table, states=before.numpy())


def computed(path: Path, before: torch.Tensor, options: CpuOptions | None = None) -> Head:
    """Logits and states of all tokens, by torch or by the kernels."""
    model, rows = open_checkpoint(path), np.arange(len(IDS), dtype=np.int32)
    assert model.unread == ()
    head = open_guess_head(model)
    if options is None:
        whole = ReferenceBackend(model.spec, model.weights, 4)
        own = ReferenceBackend(head.spec, head.weights, 4, ReferenceOptions(lender=whole))
        return own.step(batch(before), rows, [0] * len(rows), rows)
    kernels = CpuBackend(model.spec, model.weights, 4, options)
    options = CpuOptions(options.weight_format, lent=kernels.lends)
    return CpuBackend(head.spec, head.weights, 4, options).step(batch(before), rows, [0] * len(rows), rows)


def in_gguf(path: Path, name: str, head: GuessHead) -> Path:
    """The model and its head as the layer behind the last, as llama.cpp's converter writes them."""
    arch, more = FILES[name]
    longer = tiny_model(name, num_hidden_layers=5, layer_types=[STATE, STATE, STATE, FULL, FULL])
    rest = {**head.model.state_dict(), **{_fifth(key): value for key, value in head.body.state_dict().items()}}
    longer.load_state_dict({key: rest[key] for key in longer.state_dict()})
    own = {
        "eh_proj": head.fc,
        "enorm": head.pre_fc_norm_embedding + 1,
        "hnorm": head.pre_fc_norm_hidden + 1,
        "shared_head_norm": head.body.norm.weight + 1,
    }
    tensors = {f"blk.4.nextn.{key}.weight": value.detach().numpy() for key, value in own.items()}
    metadata = {f"{arch}__{key}": value for key, value in {**more, "nextn_predict_layers": 1}.items()}
    return write(path, longer, arch, beside=tensors, **metadata)


def _fifth(key: str) -> str:
    return "model." + key.replace("layers.0.", "layers.4.") if key.startswith("layers.") else key


@pytest.mark.parametrize("name", FILES)
def test_the_head_of_a_folder_and_of_a_file_is_that_of_the_reference(name, tmp_path):
    head = GuessHead(name)
    before = head.before(IDS)
    with torch.no_grad():
        states, logits = head(IDS, before)
    for path in (save_with(head, tmp_path / "folder"), in_gguf(tmp_path / "m.gguf", name, head)):
        found = computed(path, before)
        torch.testing.assert_close(torch.from_numpy(found.full), logits, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(torch.from_numpy(found.states), states, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5 moe"])
@pytest.mark.parametrize(("weight_format", "close"), [("bf16", 0.02), ("w8a8", 0.05)])
def test_the_kernels_compute_it_too(name, weight_format, close, tmp_path):
    head = GuessHead(name, **ROPE)
    before = head.before(IDS)
    with torch.no_grad():
        _, logits = head(IDS, before)
    found = torch.from_numpy(computed(save_with(head, tmp_path / "folder"), before, CpuOptions(weight_format)).full)
    assert (found - logits).abs().max() < close * logits.abs().max()


def test_the_tables_of_the_model_are_not_counted_twice(tmp_path):
    model = open_checkpoint(save_with(GuessHead("qwen3.5", **ROPE), tmp_path / "folder"))
    head = open_guess_head(model)
    for kept in ("bf16", "w8a8"):
        config = EngineConfig(model="m", weight_format=kept)
        kernels = CpuBackend(model.spec, model.weights, 4, CpuOptions(kept))
        own = CpuBackend(head.spec, head.weights, 4, CpuOptions(kept, lent=kernels.lends))
        planned = footprint.weight_bytes(config, "cpu", head.spec, head.weights.form)
        assert planned == pytest.approx(own.weight_bytes, rel=0.05)
        tables = 2 * model.spec.vocab_size * model.spec.hidden
        assert own.weight_bytes < kernels.weight_bytes - tables


# -- what is refused


def without(folder: Path, *parts: str, **more: Any) -> Path:
    """The folder without the tensors whose names have one of `parts`, and with `more`."""
    path = folder / "model.safetensors"
    kept = {key: value for key, value in load_file(path).items() if not any(part in key for part in parts)}
    save_file({**kept, **more}, path)
    return folder


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("qwen3.5", r"these files have no head that guesses tokens"),
        ("qwen3", "heads of qwen3 that guess tokens are not"),
    ],
)
def test_files_without_a_head_say_so(name, told, tmp_path):
    for path in (save(tiny_model(name), tmp_path / "m"), write(tmp_path / "m.gguf", tiny_model(name), "qwen3")):
        if path.is_dir() or name == "qwen3":
            with pytest.raises(ModelError, match=told):
                open_guess_head(open_checkpoint(path))


def test_a_head_that_is_not_whole_is_refused_by_the_name_of_what_lacks(tmp_path):
    folder = without(save_with(GuessHead("qwen3.5"), tmp_path / "m"), "mtp.fc")
    with pytest.raises(ModelError, match=r"tensor mtp\.fc\.weight is missing"):
        open_guess_head(open_checkpoint(folder))


def test_a_head_with_tables_of_its_own_or_of_two_layers_is_refused(tmp_path):
    table = {"mtp.embed_tokens.weight": torch.zeros(4, 4)}
    folder = without(save_with(GuessHead("qwen3.5"), tmp_path / "m"), **table)
    with pytest.raises(
        ModelError, match=r"mtp\.embed_tokens\.weight: a head that guesses with a vocabulary of its own"
    ):
        open_guess_head(open_checkpoint(folder))
    folder = without(folder, "mtp.embed", **{"mtp.layers.1.mlp.up_proj.weight": torch.zeros(4, 4)})
    with pytest.raises(ModelError, match="a head of 2 layers that guess tokens; one is supported"):
        open_guess_head(open_checkpoint(folder))
