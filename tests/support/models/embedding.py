"""Folders of embedding models as sentence-transformers saves them, and the same arithmetic in torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from tests.support.lazily import lazily
from tests.support.models.checkpoints import BASE, FULL, LOCAL

transformers = lazily("transformers")

GEMMA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 12,  # each token attends to tokens at most 6 away
    "layer_types": [LOCAL, FULL, LOCAL],
    "use_bidirectional_attention": True,
}


def tiny_gemma(**fields: Any) -> "transformers.PreTrainedModel":
    """EmbeddingGemma without its dense layers."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(**{**BASE, **GEMMA, **fields})
    model = transformers.Gemma3TextModel(config).eval()
    model.set_attn_implementation("eager")
    for key, parameter in model.named_parameters():
        if key.endswith("norm.weight"):
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def dense_layers() -> list[torch.nn.Linear]:
    """EmbeddingGemma's dense layers: wider, then back, without biases."""
    torch.manual_seed(1)
    return [torch.nn.Linear(64, 160, bias=False), torch.nn.Linear(160, 64, bias=False)]


def save_modules(folder: Path, dense: Sequence[torch.nn.Linear] = (), pooling: str = "mean_tokens") -> Path:
    """Writes the files that sentence-transformers puts beside a model."""
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), "Normalize"]
    modules = [
        {"idx": i, "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    for i, layer in enumerate(dense):
        own = folder / f"{i + 2}_Dense"
        own.mkdir()
        config = {"in_features": layer.in_features, "out_features": layer.out_features, "bias": layer.bias is not None}
        config["activation_function"] = "torch.nn.modules.linear.Identity"
        (own / "config.json").write_text(json.dumps(config))
        save_file({f"linear.{key}": value for key, value in layer.state_dict().items()}, own / "model.safetensors")
    return folder


def pooled(states: torch.Tensor, pooling: str, dense: Sequence[torch.nn.Linear] = ()) -> torch.Tensor:
    """The embedding of states [T, hidden], before normalisation to length 1."""
    modes = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}
    vector = torch.cat([modes[mode] for mode in pooling.split("+")])
    for layer in dense:
        vector = F.linear(vector, layer.weight, layer.bias)
    return vector
