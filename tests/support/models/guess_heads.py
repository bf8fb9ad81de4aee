"""Heads that guess (MTP) beside tiny models, and what they compute, in plain torch."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from tests.support.models.checkpoints import save, tiny_model

FULL = "full_attention"


class GuessHead(torch.nn.Module):
    """The head of a model of transformers. Its layer and its last norm are those of a model of one layer."""

    def __init__(self, name: str, **fields: Any) -> None:
        """`fields` override the configuration of both."""
        super().__init__()
        model = tiny_model(name, **fields)
        object.__setattr__(self, "model", model)  # no part of it
        self.whole = tiny_model(name, **{**fields, "num_hidden_layers": 1, "layer_types": [FULL]})
        self.body = self.whole.model
        size = model.config.hidden_size
        for parameter in self.body.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        self.fc = torch.nn.Parameter(0.2 * torch.randn(size, 2 * size))
        self.pre_fc_norm_embedding = torch.nn.Parameter(0.2 * torch.randn(size))
        self.pre_fc_norm_hidden = torch.nn.Parameter(0.2 * torch.randn(size))

    def tensors(self, folder: Path) -> dict[str, Tensor]:
        """By their names in a folder; `folder` is empty, and may be removed."""
        saved = load_file(save(self.whole, folder, "1GB") / "model.safetensors")
        names = [key for key in saved if key not in ("lm_head.weight", "model.embed_tokens.weight")]
        own = {f"mtp.{key.removeprefix('model.')}": saved[key] for key in names}
        for key in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            own[f"mtp.{key}.weight"] = getattr(self, key).data
        return own

    def forward(self, ids: list[int], before: Tensor) -> tuple[Tensor, Tensor]:
        """ids [T], states [T, hidden] of the tokens before -> states and logits, each [T, ...]."""
        embedded = self.model.model.embed_tokens(torch.tensor(ids))
        pair = self._norm(embedded, self.pre_fc_norm_embedding), self._norm(before, self.pre_fc_norm_hidden)
        joined = F.linear(torch.cat(pair, -1), self.fc)
        states = self.body(inputs_embeds=joined[None]).last_hidden_state[0]
        return states, self.model.lm_head(states)

    @torch.no_grad()
    def before(self, ids: list[int]) -> Tensor:
        """The model's states before each token; zeros before the first."""
        states = self.model.model(torch.tensor([ids])).last_hidden_state[0]
        return torch.cat([torch.zeros_like(states[:1]), states[:-1]])

    @torch.no_grad()
    def guesses(self, ids: list[int], count: int) -> list[int]:
        """The first tokens that it guesses to follow, greedily."""
        before, found = self.before(ids), list(ids)
        for _ in range(count):
            states, logits = self(found, before)
            found.append(int(logits[-1].argmax()))
            before = torch.cat([before, states[-1:]])
        return found[len(ids) :]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.model.config.rms_norm_eps) * (1 + weight)


def save_with(head: GuessHead, folder: Path) -> Path:
    """The head's model and the head, as one folder; the model's configuration tells of the head as Qwen's do."""
    save(head.model, folder, "1GB")
    path = folder / "model.safetensors"
    own = head.tensors(folder.with_name(folder.name + "-head"))
    save_file({**load_file(path), **{key: value.contiguous() for key, value in own.items()}}, path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "Next" not in config["architectures"][0]:
        config |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def chained(name: str, num_tokens: int, **fields: Any) -> GuessHead:
    """A model whose next token is the last one plus one, of the first `num_tokens`, and a head that is right as long as
    it reads the state before a token and passes its own on: it looks at nothing else.
    """
    head = GuessHead(name, **fields)
    model, size = head.model, head.model.config.hidden_size
    for part in (model.model, head.body):
        for key, parameter in part.named_parameters():
            if key.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj", "norm.weight")):
                parameter.data.zero_()
    for norm in (head.pre_fc_norm_embedding, head.pre_fc_norm_hidden):
        norm.data.zero_()
    model.model.embed_tokens.weight.data[:num_tokens] = torch.eye(size)[:num_tokens]
    model.lm_head.weight.data.mul_(0.01)
    model.lm_head.weight.data[:num_tokens] = torch.eye(size)[[*range(-1, num_tokens - 1)]]
    model.lm_head.weight.data[0] = torch.eye(size)[num_tokens - 1]
    head.fc.data.zero_()
    for token in range(num_tokens):
        head.fc.data[(token + 1) % num_tokens, size + token] = 1.0
    return head
