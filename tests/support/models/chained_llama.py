"""A Llama with constructed weights over the mock model's tokens: the likeliest token is the next letter of a chain, and
the end token after its last letter.

So greedy answers end; sampled answers are letters with some punctuation; values of a grammar end too; and every token
depends slightly on all tokens before it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits

import torch

from kvloom.rank.byte_tokenizer import EOS_ID, VOCAB_SIZE
from tests.support.lazily import lazily
from tests.support.models.byte_folder import make_byte_folder

transformers = lazily("transformers")

CHAIN = [*map(ord, " " + ascii_lowercase + ascii_uppercase + digits), EOS_ID]
MAX_LEN = 8192
_HIDDEN, _HEADS, _LAYERS = 512, 8, 2
_ONE = VOCAB_SIZE  # the dimension that is 1 for every token; those before it encode the token
_NEVER, _CHAINED = -20.0, 2.0  # logits; those of letters are about 0
_SMALL, _NOISE = 0.05, 0.03  # factors of the layers' output and of its weight: earlier tokens change logits by 0.2
_LIKELY = {
    **dict.fromkeys(map(ord, ",.:[]"), -1.0),
    **dict.fromkeys(map(ord, "<{"), 0.0),
    **dict.fromkeys(map(ord, '"}'), 0.5),
    ord(" "): -2.0,
    ord("\n"): -3.0,
    EOS_ID: -1.0,
}


def chained_answer(prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    """The greedy answer to a prompt: its first `num_tokens` tokens."""
    answer = [prompt_ids[-1]]
    for _ in range(num_tokens):
        at = CHAIN.index(answer[-1]) if answer[-1] in CHAIN else None
        answer.append(CHAIN[0] if at is None else [*CHAIN[1:], CHAIN[1]][at])
    return answer[1:]


def make_chained_llama(folder: Path) -> None:
    """Writes the model to a Hugging Face folder in float32."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=_HIDDEN, intermediate_size=_HIDDEN, num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS, num_key_value_heads=_HEADS, max_position_embeddings=MAX_LEN, eos_token_id=EOS_ID,
        bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight.zero_()
        embeddings[:, :VOCAB_SIZE] = torch.eye(VOCAB_SIZE)
        embeddings[:, _ONE] = 1
        for layer in model.model.layers:  # they write only to the other dimensions
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight.normal_(std=_SMALL * _HIDDEN**-0.5)[: _ONE + 1] = 0
        logits = torch.full((VOCAB_SIZE,), _NEVER)
        logits[CHAIN] = 0
        for token_id, value in _LIKELY.items():
            logits[token_id] = value
        chained = torch.full((VOCAB_SIZE,), CHAIN[0])
        chained[CHAIN] = torch.tensor([*CHAIN[1:], CHAIN[1]])
        head = model.lm_head.weight.normal_(std=_NOISE)
        head[:, _ONE] = logits
        head[:, :VOCAB_SIZE] = 0
        head[chained, torch.arange(VOCAB_SIZE)] += _CHAINED - logits[chained]
        head[:, : _ONE + 1] /= (_HIDDEN / 2) ** 0.5  # what the norm makes of the two ones of an embedding
    model.save_pretrained(folder)
    made = json.loads((folder / "config.json").read_bytes())
    weights = (folder / "model.safetensors").rename(folder / "kept")
    make_byte_folder(folder, ("<bos>", "<eos>"), **made)
    weights.rename(folder / "model.safetensors")
