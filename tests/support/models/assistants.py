"""Assistants of Gemma 4 beside tiny models, and what they guess, by transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.models.checkpoints import BASE, FULL, GEMMA4, LOCAL, save, tiny_model

SHARING = "gemma4, shared keys and inputs of layers"
FROM_KEYS = "gemma4, values from keys"
UNIFIED = "gemma4, unified"
KINDS = (SHARING, FROM_KEYS, UNIFIED)
SIZES: dict[str, Any] = {
    "vocab_size_per_layer_input": 0,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "layer_types": [LOCAL, LOCAL, FULL],
}


class Pair:
    """A model of transformers and an assistant for it, both random."""

    def __init__(self, name: str, own: dict[str, Any] | None = None, **fields: Any) -> None:
        """`fields` override the configuration of the model, `own` that of the assistant."""
        self.model = tiny_model(name, **fields)
        config = self.model.config
        kind = "Gemma4Unified" if name == UNIFIED else "Gemma4"
        heads = {"num_global_key_value_heads": 1, "attention_k_eq_v": True} if name == FROM_KEYS else {}
        of_model = {key: getattr(config, key) for key in ("vocab_size", "max_position_embeddings")}
        text = {**BASE, **GEMMA4, **SIZES, **heads, **of_model}
        text = getattr(transformers, f"{kind}TextConfig")(**{**text, **(own or {})})
        own_config = getattr(transformers, f"{kind}AssistantConfig")(
            text_config=text, backbone_hidden_size=config.hidden_size
        )
        torch.manual_seed(1)
        self.assistant = getattr(transformers, f"{kind}AssistantForCausalLM")(own_config).eval()
        self.assistant.set_attn_implementation("eager")
        for key, parameter in self.assistant.named_parameters():
            scale = 1.0 if key.endswith("norm.weight") else 0.0
            parameter.data = scale + 0.3 * torch.randn_like(parameter)

    @torch.no_grad()
    def chain(self, ids: list[int], count: int) -> tuple[list[int], torch.Tensor]:
        """The first tokens that it guesses to follow, greedily, and the logits of each [count, vocab]. Keys of the last
        token are not there yet; a window counts that token, as llama.cpp does.
        """
        found = self.model(torch.tensor([ids[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
        keys = dict(found.shared_kv_states)
        seen = self.model.config.sliding_window - 1
        keys[LOCAL] = tuple(side[:, :, -seen:] for side in keys[LOCAL])
        state, tokens, logits = found.hidden_states[-1][:, -1:], list(ids), []
        for _ in range(count):
            embedded = self.model.model.embed_tokens(torch.tensor([tokens[-1:]]))
            given = torch.cat([embedded, state], -1)
            made = self.assistant(
                inputs_embeds=given, position_ids=torch.tensor([[len(ids) - 1]]), shared_kv_states=keys
            )
            state = made.last_hidden_state
            logits.append(made.logits[0, 0])
            tokens.append(int(logits[-1].argmax()))
        return tokens[len(ids) :], torch.stack(logits)

    def guesses(self, ids: list[int], count: int) -> list[int]:
        """Of chain, the tokens."""
        return self.chain(ids, count)[0]

    def save(self, folder: Path) -> tuple[str, str]:
        """Both as folders."""
        return str(save(self.model, folder / "model", "1GB")), str(save(self.assistant, folder / "assistant", "1GB"))


def chained(num_tokens: int, **fields: Any) -> Pair:
    """A model whose next token is the last one plus one, of the first `num_tokens`, and an assistant that is right as
    long as it reads the state before a token and passes its own on: it looks at nothing else.
    """
    pair = Pair(FROM_KEYS, {"hidden_size": 64}, tie_word_embeddings=False, final_logit_softcapping=None, **fields)
    model, own = pair.model, pair.assistant
    for part in (model.model, own.model):
        for key, parameter in part.named_parameters():
            if key.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.data.zero_()
            elif key.endswith("norm.weight"):
                parameter.data.fill_(1.0)
        for key, buffer in part.named_buffers():
            if key.endswith("layer_scalar"):
                buffer.fill_(1.0)
    rows = torch.eye(64)[:num_tokens]
    for table in (model.model.embed_tokens.weight, own.model.embed_tokens.weight, model.lm_head.weight):
        table.data.mul_(0.01)
    model.model.embed_tokens.weight.data[:num_tokens] = rows
    own.model.embed_tokens.weight.data[:num_tokens] = rows
    model.lm_head.weight.data[:num_tokens] = rows.roll(1, 0)
    for end in (own.pre_projection, own.post_projection):
        end.weight.data.zero_()
    for token in range(num_tokens):
        own.pre_projection.weight.data[(token + 2) % num_tokens, 64 + token] = 1.0
        own.post_projection.weight.data[(token - 1) % num_tokens, token] = 1.0
    return pair
