"""Where answers of a GGUF file's model end. Files name one such token, seldom several: converters drop the others of a
list. So the others are known by their spelling, as in llama.cpp (src/llama-vocab.cpp).
"""

from collections.abc import Mapping, Sequence
from typing import Any

NORMAL, CONTROL = 1, 3  # token types of GGUF
_SPELT = """
    </s> <eos> <|endoftext|> <|end_of_text|> [EOS] <｜end▁of▁sentence｜> [e~[
    <|eot_id|> <|im_end|> <|end|> <|return|> <|flush|> <end_of_turn> <|eom_id|> <EOT> _<EOT> [EOT] <turn|>
    <end_of_utterance> <|call|> <|calls|> <|tool_response>
    <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]
    <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
"""  # of texts; of turns and calls; what completes code ends with
_SPELLINGS = frozenset(_SPELT.split())
_NAMED = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_DEFAULTS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "bert": {"cls": 101, "seperator": 102, "unknown": 100},
}  # by tokenizer.ggml.model, where the file says nothing


def named_id(meta: Mapping[str, Any], name: str) -> int | None:
    """The id that the file gives as `name` (bos, eos, ...), or that its kind of tokenizer has; None without one."""
    default = _DEFAULTS.get(meta.get("tokenizer.ggml.model", ""), {}).get(name)
    id = meta.get(f"tokenizer.ggml.{name}_token_id", default)
    return id if isinstance(id, int) and 0 <= id < len(meta["tokenizer.ggml.tokens"]) else None


def end_ids(meta: Mapping[str, Any]) -> frozenset[int]:
    """The tokens that end an answer: those that the file names, and those that are spelt like an end."""
    tokens: Sequence[str] = meta["tokenizer.ggml.tokens"]
    named = {id for name in _NAMED if (id := named_id(meta, name)) is not None}
    found = named | {id for id, text in enumerate(tokens) if text in _SPELLINGS}
    texts = {tokens[id] for id in found}
    left_out = set()
    if _ends_messages_otherwise(texts):
        left_out.add("<|end|>")
    if texts & {"<|tool_response>", "<|plamo:eos|>"}:
        left_out.add("</s>")
    return frozenset(id for id in found if tokens[id] not in left_out)


def token_types(meta: Mapping[str, Any]) -> list[int]:
    """The type of each token. One that ends answers is a control token, whatever the file says."""
    count = len(meta["tokenizer.ggml.tokens"])
    types = list(meta.get("tokenizer.ggml.token_type") or [])[:count]
    types += [NORMAL] * (count - len(types))
    for id in end_ids(meta):
        types[id] = CONTROL
    return types


def _ends_messages_otherwise(texts: set[str]) -> bool:
    """Whether `<|end|>` only ends one of an answer's messages, as in gpt-oss and Solar Open."""
    has_call = bool(texts & {"<|call|>", "<|calls|>"})
    return has_call and bool(texts & {"<|return|>", "<|flush|>"})
