"""Prompt lookup: drafts the tokens that followed the last occurrence of the same n-gram, in prompt or answer.

A draft costs rows of the next step and never changes the answer: the rank samples every position as it would have
without drafts, and a drafted token counts only where it equals the sampled one (Leviathan et al. 2023 with a table as
draft model; Yang et al. 2023, LLMA).
"""

from collections.abc import Sequence

from kvloom.contract.config import EngineConfig
from kvloom.contract.messages import RankInfo


class PromptLookup:
    """The n-grams of one sequence and where each occurred last. Owned by the engine's thread.

    Drafts grow while they are accepted and shrink when they are rejected, so that text without repetition costs little.
    """

    def __init__(self, min_tokens: int, max_tokens: int, max_draft: int) -> None:
        """Looks up the last `max_tokens` tokens, then shorter n-grams down to `min_tokens`; drafts at most `max_draft`
        tokens.
        """
        self._sizes = range(max_tokens, min_tokens - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> end of its last occurrence before the current one
        self._num_indexed = 0  # n-grams that end at or before this position are in _ends
        self._max_draft = self._reach = max_draft

    def propose(self, token_ids: Sequence[int], max_draft: int) -> list[int]:
        """At most `max_draft` tokens that may follow; none when no n-gram at the end of `token_ids` occurred before.

        `token_ids` must extend those of the last call.
        """
        self._index(token_ids)
        count = min(self._reach, max_draft)
        for size in self._sizes:
            end = self._ends.get(tuple(token_ids[-size:])) if count > 0 and len(token_ids) > size else None
            if end is not None:
                return list(token_ids[end : end + count])
        return []

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Adapt to the fate of the last draft: the next one is at most twice the accepted length plus one."""
        if num_drafted:
            self._reach = min(self._max_draft, 2 * num_accepted + 1)

    def _index(self, token_ids: Sequence[int]) -> None:
        """Enter n-grams that end before the last token, so that the end of the sequence never finds itself."""
        for end in range(self._num_indexed + 1, len(token_ids)):
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(token_ids[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, len(token_ids) - 1)


def lookup_of(config: EngineConfig, info: RankInfo) -> PromptLookup | None:
    """The draft source of one sequence; None when speculation is off, or a rejected draft would stay in a state."""
    if not config.num_speculative_tokens or info.num_states:
        return None
    return PromptLookup(config.prompt_lookup_min, config.prompt_lookup_max, config.num_speculative_tokens)
