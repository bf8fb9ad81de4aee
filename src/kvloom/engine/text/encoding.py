"""Texts to token ids, with a bounded length, and special tokens only where they are meant."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import normalizers, pre_tokenizers

from kvloom.engine.text.pieces import is_divisible, pieces, spec

# NFC may turn this many bytes into one: the longest text canonically equivalent to a character is 3.5 times as long
# (U+0390; tests/engine/text/test_encoding.py checks all characters)
_NFC_SHRINKS = 4
_SPACE = "▁"
Steps = tuple[Any, Any]  # normalizer and pre-tokenizer of the `tokenizers` library, either of which may be None
MAX_WHOLE_CHARS = 1 << 15  # characters; a shorter text is not cut into pieces


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte: the byte itself where printable, else a character from U+0100 on."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + i) for i, byte in enumerate(moved)}


class Encoder:
    """Encodes with one tokenizer. Safe to call from several threads."""

    def __init__(self, fast: FastTokenizer, is_byte_level: bool) -> None:
        self._fast = fast
        self._is_divisible = is_divisible(fast)
        self._is_byte_level = is_byte_level
        self._special = {i: token.content for i, token in fast.get_added_tokens_decoder().items() if token.special}
        self._lock = threading.Lock()

    @cached_property
    def _max_length(self) -> int:
        return _max_length(self._fast, self._is_byte_level)

    @cached_property
    def _unspelt(self) -> bytes:
        return _unspelt(self._fast)

    def least_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens, found without tokenising; 0 where the tokenizer guarantees none."""
        if not self._max_length:
            return 0
        data = text.encode(errors="replace").translate(None, self._unspelt) if self._is_byte_level else text
        return -(-len(data) // self._max_length)

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Lone surrogates become U+FFFD. A text that can be cut is read only until it has more than `max_tokens`
        tokens.
        """
        with self._lock:
            return self._encode(_clean(text), add_special_tokens, max_tokens)

    def encode_within(self, text: str, max_tokens: int, add_special_tokens: bool) -> list[int]:
        """See Tokenizer."""
        with self._lock:
            ids = self._encode(_clean(text), add_special_tokens, max_tokens)
            if len(ids) <= max_tokens:
                return ids
            after = self._ends[1][:max_tokens] if add_special_tokens else []
        return ids[: max_tokens - len(after)] + after

    def ends(self) -> tuple[list[int], list[int]]:
        """The tokens that the tokenizer puts before and behind each text."""
        with self._lock:
            return self._ends

    def encode_inside(self, text: str, is_plain: bool) -> list[int]:
        """See Tokenizer."""
        with self._lock, self._reading(is_plain, self._inside):
            return self._ids_of(_clean(text), False)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """See Tokenizer."""
        with self._lock:
            found = self._fast.encode(_clean(first), _clean(second))
        types: list[int] = found.type_ids
        return list(found.ids), types.index(1) if 1 in types else 0

    def encode_marked(
        self, text: str, marks: Mapping[str, str], add_special_tokens: bool, max_tokens: int | None = None
    ) -> list[int]:
        """As `encode`, with each character of `marks` replaced by its original; a special token that contains a mark is
        plain text.

        The tokenizer itself finds the special tokens: with marks in it, a user's text contains none. The parts between
        them are encoded with special tokens disabled, and give the same ids as in the whole text.
        """
        clean, table = _clean(text), {ord(mark): original for mark, original in marks.items()}
        with self._lock:
            ids: list[int] = []
            for part, special in self._parts(clean):
                plain = part.translate(table)
                if plain:
                    with self._reading(True, self._later if ids else self._whole):
                        ids += self._encode(plain, False, None if max_tokens is None else max_tokens - len(ids))
                ids += special
                if max_tokens is not None and len(ids) > max_tokens:
                    break
            return self._with_ends(ids) if add_special_tokens else ids

    def _encode(self, text: str, add_special_tokens: bool, max_tokens: int | None) -> list[int]:
        if not self._is_divisible or len(text) <= MAX_WHOLE_CHARS:
            return self._ids_of(text, add_special_tokens)
        ids: list[int] = []
        for piece in pieces(text):
            ids += self._ids_of(piece, False)
            if max_tokens is not None and len(ids) > max_tokens:
                break
        return self._with_ends(ids) if add_special_tokens else ids

    def _ids_of(self, text: str, add_special_tokens: bool) -> list[int]:
        """Of a text as it is. While a long one is read other threads go on: only a batch releases their lock."""
        if len(text) > MAX_WHOLE_CHARS:
            (found,) = self._fast.encode_batch([text], add_special_tokens=add_special_tokens)
        else:
            found = self._fast.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        return ids

    def _with_ends(self, ids: list[int]) -> list[int]:
        before, after = self._ends
        return [*before, *ids, *after]

    @cached_property
    def _ends(self) -> tuple[list[int], list[int]]:
        bare = self._fast.encode("a", add_special_tokens=False).ids
        whole = self._fast.encode("a", add_special_tokens=True).ids
        for at in range(len(whole) - len(bare) + 1):
            if whole[at : at + len(bare)] == bare:
                return whole[:at], whole[at + len(bare) :]
        return [], []

    def _parts(self, text: str) -> Iterator[tuple[str, list[int]]]:
        """Pairs of a text and the special token behind it."""
        found = self._fast.encode(text, add_special_tokens=False)
        end = 0
        for id, (start, stop) in zip(found.ids, found.offsets, strict=True):
            if id in self._special and text[start:stop].strip() == self._special[id].strip():
                yield text[end:start], [id]
                end = stop
        yield text[end:], []

    @cached_property
    def _whole(self) -> Steps:
        return self._fast.normalizer, self._fast.pre_tokenizer

    @cached_property
    def _later(self) -> Steps:
        """For the part of a text behind a special token."""
        normalizer, splitter = self._whole
        is_prefixed = isinstance(splitter, pre_tokenizers.Metaspace) and splitter.prepend_scheme == "first"
        return normalizer, _unprefixed(splitter) if is_prefixed else splitter

    @cached_property
    def _inside(self) -> Steps:
        """For a piece of a text that does not begin it: no space is put before it."""
        normalizer, splitter = self._whole
        return _unprefixed(normalizer), _unprefixed(splitter)

    @contextmanager
    def _reading(self, is_plain: bool, steps: Steps) -> Iterator[None]:
        """An encoder with other first steps; if `is_plain` it reads special tokens as text."""
        whole = self._whole
        self._fast.encode_special_tokens = is_plain
        if steps != whole:
            self._fast.normalizer, self._fast.pre_tokenizer = steps
        try:
            yield
        finally:
            self._fast.encode_special_tokens = False
            if steps != whole:
                self._fast.normalizer, self._fast.pre_tokenizer = whole


def _unprefixed(step: Any) -> Any:
    """A normalizer or pre-tokenizer without what puts a space before a text."""
    told = spec(step)
    changed = _without_prefix(told)
    if changed == told:
        return step
    if changed is None:
        return None
    if "normalizers" in changed:
        new: Any = normalizers.Sequence([])
    elif "pretokenizers" in changed:
        new = pre_tokenizers.Sequence([])
    else:
        new = type(step)()
    new.__setstate__(json.dumps(changed).encode())
    return new


def _without_prefix(told: Any) -> Any:
    """The same of a step's specification; None if nothing is left of it."""
    if not told:
        return told
    for key in ("normalizers", "pretokenizers"):
        if key in told:
            return told | {key: [part for part in map(_without_prefix, told[key]) if part]}
    if told["type"] == "Prepend":
        return None
    if told["type"] == "Metaspace":
        return told | {"prepend_scheme": "never"}
    return told | ({"add_prefix_space": False} if "add_prefix_space" in told else {})


def _clean(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _max_length(fast: FastTokenizer, is_byte_level: bool) -> int:
    """The most bytes of text (characters, where tokens are spelt in characters) that one token stands for; 0 =
    unbounded.
    """
    tokens = fast.get_added_tokens_decoder().values()
    if spec(fast.model)["type"] != "BPE" or any(token.lstrip or token.rstrip for token in tokens):
        return 0
    vocab = fast.get_vocab(with_added_tokens=False)
    longest = max(map(len, vocab), default=0)
    normalizer = spec(fast.normalizer)
    if is_byte_level:
        # NFC may turn bytes that have letters into others that have none
        shrinks = {"": 1, "NFC": 0 if _unspelt(fast) else _NFC_SHRINKS}.get(normalizer["type"] if normalizer else "", 0)
        return shrinks * max([longest, *(len(token.content.encode()) for token in tokens)])
    has_all = fast.model.byte_fallback and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    if not has_all or not _only_marks_spaces(normalizer) or not _only_marks_spaces(spec(fast.pre_tokenizer)):
        return 0
    return max([longest, *(len(token.content) for token in tokens)])


def _unspelt(fast: FastTokenizer) -> bytes:
    """The bytes without a letter in a byte-level vocabulary: a text loses them, or they are one unknown token."""
    vocab = fast.get_vocab(with_added_tokens=False)
    return bytes(byte for byte, letter in byte_alphabet().items() if letter not in vocab)


def _only_marks_spaces(part: Any) -> bool:
    """Whether this normalizer keeps every character, or only turns spaces into U+2581."""
    if part is None:
        return True
    if part["type"] == "Sequence":
        return all(_only_marks_spaces(each) for each in part.get("normalizers", part.get("pretokenizers")))
    if part["type"] == "Replace":
        return bool(part["pattern"] == {"String": " "} and part["content"] == _SPACE)
    return part["type"] in ("Prepend", "Metaspace")
