"""The tokens of a Hugging Face folder: those of tokenizer.json, and those that only its other files name.

Files that transformers wrote years ago hold tokens in tokenizer_config.json, special_tokens_map.json or
added_tokens.json alone. They are added as transformers adds them: first those that have an id there, then those that
are named for a purpose, behind all others. A token whose id is stated has that id here; transformers 5 takes the next.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from kvloom.checkpoints.files import open_file, read_json, read_object, read_text
from kvloom.contract.errors import ModelError

MAX_ID = 1 << 22  # the largest vocabularies have a million tokens; the library makes a list of all ids between two
_BOM = b"\xef\xbb\xbf"
_PURPOSES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip")


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, in which special_tokens_map.json has the last word. Raises ModelError."""
    config = optional_object(folder / "tokenizer_config.json")
    told = optional_object(folder / "special_tokens_map.json")
    return config | {key: value for key, value in told.items() if key in (*_PURPOSES, *_LISTS) and value is not None}


def optional_object(path: Path) -> dict[str, Any]:
    """Empty where there is no such file, or it holds something else than an object. Raises ModelError."""
    value = read_json(path) if path.exists() else {}
    return value if isinstance(value, dict) else {}


def read_fast(folder: Path, config: Mapping[str, Any]) -> FastTokenizer:
    """The tokenizer with all tokens of the folder. `config`: tokenizer_config(folder). Raises ModelError."""
    path = folder / "tokenizer.json"
    with open_file(path) as file:  # excludes pipes and devices
        has_bom = file.read(len(_BOM)) == _BOM
    fast = FastTokenizer.from_str(read_text(path)) if has_bom else FastTokenizer.from_file(str(path))
    stated = _stated(folder, config)
    missing = {id: stated[id] for id in sorted(stated) if fast.token_to_id(stated[id].content) is None}
    if missing:
        fast = _with_ids(path, missing)
    special = {token.content for token in fast.get_added_tokens_decoder().values() if token.special}
    fast.add_special_tokens([token for token in _named(config) if token.content not in special])
    return fast


def content(token: Any) -> str:
    """The text of a special token: configurations hold strings or {"content": ...}."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _stated(folder: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Tokens by the ids that the files give them. Raises ModelError."""
    found = {}
    older = optional_object(folder / "added_tokens.json")
    newer = config.get("added_tokens_decoder")
    pairs = [(id, {"content": text}) for text, id in older.items()]
    for id, told in (*pairs, *(newer.items() if isinstance(newer, dict) else ())):
        number = int(id) if str(id).isdecimal() and len(str(id)) < 10 else -1
        if not 0 <= number <= MAX_ID or not content(told):
            raise ModelError(
                f"{folder}: added_tokens_decoder must map token ids to tokens, got {id!r:.80}: {told!r:.80}"
            )
        found[number] = _added(told)
    return found


def _with_ids(path: Path, missing: Mapping[int, AddedToken]) -> FastTokenizer:
    """The tokenizer with these tokens at these ids. Raises ModelError when another token has one, or there would be a
    gap in a vocabulary that cannot have one.
    """
    document = read_object(path)
    vocab = document["model"]["vocab"]
    if isinstance(vocab, dict):  # of an added token that is there, the library takes the id
        taken = {id: text for text, id in vocab.items()}
        taken |= {token["id"]: token["content"] for token in document.get("added_tokens") or []}
        for id, token in missing.items():
            if id in taken:
                raise ModelError(
                    f"{path}: token {id} is {taken[id]!r:.80}, but {token.content!r:.80} in tokenizer_config.json"
                )
            vocab[token.content] = id
    fast = FastTokenizer.from_str(json.dumps(document))
    fast.add_tokens(list(missing.values()))
    for id, token in missing.items():
        if fast.token_to_id(token.content) != id:
            raise ModelError(
                f"{path}: token {id} of tokenizer_config.json does not follow the last one, and no gap can be"
            )
    return fast


def _named(config: Mapping[str, Any]) -> Iterator[AddedToken]:
    """The special tokens that are named for a purpose, each once, in the order in which they get ids."""
    told = [config.get(purpose) for purpose in _PURPOSES]
    for key in _LISTS:
        more = config.get(key) or []
        told += list(more.values()) if isinstance(more, dict) else more if isinstance(more, list) else [more]
    yield from {token.content: token for token in map(_added, filter(content, told))}.values()


def _added(told: Any) -> AddedToken:
    flags = told if isinstance(told, dict) else {}
    return AddedToken(
        content(told),
        normalized=bool(flags.get("normalized", False)),
        special=bool(flags.get("special", not isinstance(told, dict))),
        **{flag: bool(flags.get(flag, False)) for flag in _FLAGS},
    )
