"""What tokens contribute to a text, as the tokenizer's own decoder has it.

A token's bytes are those that it adds between two others, so the bytes of any tokens can be joined. Some decoders treat
the first token of a text differently, because their encoders put a space before a text: `begin` says how.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from kvloom.engine.text.encoding import byte_alphabet

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_KEPT_TOKENS = 8192  # whose bytes are cached: most of what a model writes
_OTHER = "a"  # a token between two of which another one is decoded
_BYTE_OF = {text: byte for byte, text in byte_alphabet().items()}


class Spelling:
    """The bytes of one tokenizer's tokens. `is_byte_level`: they are spelt in GPT-2's byte alphabet."""

    def __init__(self, fast: FastTokenizer, is_byte_level: bool) -> None:
        self._fast, self._is_byte_level = fast, is_byte_level
        self._added = {i: token.content for i, token in fast.get_added_tokens_decoder().items()}
        self._decode: Callable[[list[str]], str] = fast.decoder.decode if fast.decoder else " ".join
        self._falls_back = bool(getattr(fast.model, "byte_fallback", False)) or "ByteFallback" in repr(fast.decoder)
        self._end = self._decode([_OTHER, _OTHER])[len(_OTHER) :]  # of a text that another token ends
        self.bytes_of = functools.lru_cache(_KEPT_TOKENS)(self._bytes_of)

    def begin(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes that each of the tokens contributes to a text that begins with them."""
        found = [self.bytes_of(i) for i in ids]
        first = next((index for index, data in enumerate(found) if data), None)
        if first is not None and not self._is_byte_level:
            found[first] = self._first(ids[first], found[first])
        return found

    def _bytes_of(self, id: int) -> bytes:
        text = self._fast.id_to_token(id) or ""
        if self._is_byte_level:
            return self._from_alphabet(text, id in self._added)
        byte = self._byte(text)
        return self._between(text) if byte is None and text else byte or b""

    def _from_alphabet(self, text: str, is_added: bool) -> bytes:
        """An added token is matched in texts as it is written, and need not be written in the alphabet."""
        if any(letter not in _BYTE_OF for letter in text):
            return text.encode()
        data = bytes(_BYTE_OF[letter] for letter in text)
        return text.encode() if is_added and not _is_whole(data) else data

    def _byte(self, text: str) -> bytes | None:
        found = BYTE_TOKEN.match(text) if self._falls_back else None
        return bytes([int(found[1], 16)]) if found else None

    def _between(self, text: str) -> bytes:
        """Decoded between two other tokens; as it is spelt where the decoder changes those."""
        whole = self._decode([_OTHER, text, _OTHER])
        if not whole.startswith(_OTHER) or not whole.endswith(self._end):
            return text.encode()
        return whole[len(_OTHER) : len(whole) - len(self._end)].encode()

    def _first(self, id: int, data: bytes) -> bytes:
        """The token's bytes where it is the first one, given those between two others."""
        text = self._fast.id_to_token(id) or ""
        if self._byte(text) not in (None, b" "):
            return data  # decoded alone, a part of a character is none
        whole = self._decode([text, _OTHER])
        return whole.removesuffix(self._end).encode() if whole.endswith(self._end) else data


def _is_whole(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def joined(parts: Sequence[bytes]) -> str:
    """The text of tokens' bytes; those that are not UTF-8 become U+FFFD."""
    return b"".join(parts).decode("utf-8", errors="replace")


def is_byte_level(decoder: Any) -> bool:
    """Whether a decoder of the `tokenizers` library reads GPT-2's byte alphabet."""
    return "ByteLevel" in repr(decoder)
