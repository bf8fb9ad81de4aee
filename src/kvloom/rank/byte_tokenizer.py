"""The tokenizer of the model without weights."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

BOS_ID, EOS_ID = 256, 257
VOCAB_SIZE = 258


class ByteTokenizer:
    """A token is a byte; 256 begins and 257 ends a sequence."""

    eos_ids = frozenset({EOS_ID})
    bos_id = BOS_ID
    vocab_size = VOCAB_SIZE
    special_texts: frozenset[str] = frozenset()  # its special tokens are never read from a text

    @property
    def eos_id(self) -> int | None:
        return min(self.eos_ids, default=None)

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    def encode_within(self, text: str, max_tokens: int, add_special_tokens: bool = True) -> list[int]:
        return self.encode(text)[:max_tokens]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        ids = self.encode(first)
        return ids + self.encode(second), len(ids)

    def encode_inside(self, text: str, is_plain: bool = True) -> list[int]:
        return self.encode(text)

    def encode_marked(
        self, text: str, marks: Mapping[str, str], add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        return self.encode(
            text.translate({ord(mark): original for mark, original in marks.items()}), add_special_tokens
        )

    def least_tokens(self, text: str) -> int:
        return len(text)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        skipped = (BOS_ID, EOS_ID) if skip_special_tokens else ()
        return b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode("utf-8", errors="replace")

    def prompt_bytes(self, ids: Sequence[int]) -> list[bytes]:
        return [self.token_bytes(id) for id in ids]

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<bos>" if token_id == BOS_ID else b"<eos>"

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id >= 256

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        lines = [f"{message.get('role', 'user')}: {message.get('content') or ''}\n" for message in messages]
        return "".join(lines) + ("assistant: " if add_generation_prompt else "")

    def chat_template(self, has_tools: bool = False) -> str:
        return ""
