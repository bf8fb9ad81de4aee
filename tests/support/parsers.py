"""Tokenizers that show where and how a body is parsed; importable by the process that parses."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from kvloom.rank.fake import ByteTokenizer

HUGE = 4 << 30


class PidTokenizer(ByteTokenizer):
    """Every text is three tokens that say which process has read it."""

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        return list(os.getpid().to_bytes(3, "big"))

    def least_tokens(self, text: str) -> int:
        return 0


class TroubledTokenizer(ByteTokenizer):
    """Does what a text begins with: "wait" for ever, "die", "fill" the memory. `folder`: where it says who it is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        (self._folder / "pid").write_text(str(os.getpid()))
        if text.startswith("wait"):
            while True:
                time.sleep(3600)
        if text.startswith("die"):
            os._exit(3)
        if text.startswith("fill"):
            return list(bytes(HUGE))
        return [1, 2, 3]

    def least_tokens(self, text: str) -> int:
        return 0


class StrictTokenizer(ByteTokenizer):
    """A token is up to eight bytes; no text is read that cannot have at most `max_tokens`."""

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        assert max_tokens is not None
        assert len(text) <= 8 * max_tokens, "a text that cannot fit was tokenised"
        return [65] * -(-len(text) // 8)

    def encode_marked(
        self, text: str, marks: Mapping[str, str], add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        raise AssertionError("there are no special tokens")

    def least_tokens(self, text: str) -> int:
        return -(-len(text) // 8)
