"""Where a text may be cut so that its pieces, encoded one by one, give the same tokens as the whole text.

A cut stands after a letter and before a space that a letter follows, or before a CJK comma or full stop. This is
correct for the pre-tokenizers of KNOWN: none of their alternatives continues from a letter to a space or to such a
mark, none looks behind, and look-aheads begin at white space only. So the pre-tokenizer splits there in any context,
and merges stay within a split. None of the characters at a cut is changed by, or composes under, NFC.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

PIECE_CHARS = 8192

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ANY = r"[^\r\n\p{L}\p{N}]?"
KNOWN = frozenset(
    {
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST,  # Qwen 2 to 3
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST,  # Llama 3
        f"{_ANY}{_UPPER}*{_LOWER}+|{_ANY}{_UPPER}+{_LOWER}*" + r"|\p{N}" + _SLASHES,  # Mistral's tekken
    }
)
_CUT = re.compile(r"[A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3](?=[\uff0c\u3002\u3001]| [A-Za-z])")
_LETTER = re.compile(r"[A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3]")


def is_divisible(fast: Any) -> bool:
    """Whether `pieces` may be used with this tokenizer (of the `tokenizers` library)."""
    normalizer, splits = spec(fast.normalizer), spec(fast.pre_tokenizer)
    if normalizer is not None and normalizer["type"] != "NFC":
        return False
    if splits is None or spec(fast.model)["type"] != "BPE" or fast.model.dropout:
        return False
    parts = splits["pretokenizers"] if splits["type"] == "Sequence" else [splits]
    return any(map(_is_known, parts)) and all(_is_harmless(part) for part in parts) and not _has_far_tokens(fast)


def pieces(text: str) -> Iterator[str]:
    """The text in order, in pieces of about PIECE_CHARS characters; longer where no cut is possible."""
    begin = 0
    while len(text) - begin > PIECE_CHARS:
        cut = _CUT.search(text, begin + PIECE_CHARS)
        if cut is None:
            break
        yield text[begin : cut.end()]
        begin = cut.end()
    yield text[begin:]


def _is_known(part: dict[str, Any]) -> bool:
    if part["type"] == "ByteLevel":
        return bool(part["use_regex"])
    pattern = part.get("pattern", {}).get("Regex") if part["type"] == "Split" else None
    return pattern in KNOWN and part["behavior"] == "Isolated" and not part["invert"]


def _is_harmless(part: dict[str, Any]) -> bool:
    if part["type"] == "ByteLevel":
        return not part["add_prefix_space"]
    return part["type"] == "Digits" or _is_known(part)


def _has_far_tokens(fast: Any) -> bool:
    """Whether an added token, which is matched anywhere in the text, may span a cut."""
    return any(
        token.lstrip
        or token.rstrip
        or (token.single_word and _LETTER.search(token.content))
        or re.search(r"\s|[\uff0c\u3002\u3001]", token.content)
        for token in fast.get_added_tokens_decoder().values()
    )


def spec(part: Any) -> Any:
    """The specification of a tokenizer's part as its file has it, without the vocabulary of a model."""
    if part is None:
        return None
    if hasattr(part, "dropout"):  # a BPE model; its vocabulary is large
        return {"type": "BPE"}
    if not hasattr(part, "__getstate__"):
        return {"type": ""}
    return json.loads(part.__getstate__())
