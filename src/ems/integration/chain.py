"""Names of a request's full blocks: a SHA-256 chain over token ids and whatever else decides their KV. Pure.

The engine's own block hashes do not serve: vLLM draws their root anew in every process.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

ExtraKeys = Callable[[Any, int, int, int], tuple[tuple[Any, ...] | None, int]]
"""(request, first token, end, first multimodal item) -> what else decides the block's KV, next multimodal item."""


class TokenSource(Protocol):
    """What is needed of an engine's request; its tokens only grow."""

    @property
    def all_token_ids(self) -> Sequence[int]: ...


class Chain:
    """The hashes of one request's blocks, made as its tokens become known; 256-bit integers."""

    def __init__(self, block_size: int, extra_keys: ExtraKeys, root: bytes = b"") -> None:
        """root: what all names hang on; chains of different roots share nothing."""
        self._block_size = block_size
        self._extra_keys = extra_keys
        self._mm_index = 0
        self._previous = root
        self._hashes: list[int] = []

    def upto(self, request: TokenSource, num_blocks: int) -> list[int]:
        """The hashes of the first blocks, which the request's tokens must fill."""
        size = self._block_size
        for start in range(len(self._hashes) * size, num_blocks * size, size):
            tokens = list(request.all_token_ids[start : start + size])
            assert len(tokens) == size, "a block that is not full has no name"
            extra, self._mm_index = self._extra_keys(request, start, start + size, self._mm_index)
            digest = hashlib.sha256(self._previous + struct.pack(f"<{size}q", *tokens))
            digest.update(repr(extra).encode() if extra else b"")
            self._previous = digest.digest()
            self._hashes.append(int.from_bytes(self._previous, "big"))
        return self._hashes[:num_blocks]
