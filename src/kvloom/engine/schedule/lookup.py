"""Prompt lookup: guesses what follows from what followed the last time the same few tokens came, in prompt or answer.

A guess costs a few rows of the next step and changes no answer: the rank samples every position as it would have
without, and a guess counts only where it is the token sampled (Leviathan et al. 2023 with a table for a draft model;
Yang et al. 2023, LLMA).
"""

from collections.abc import Sequence

from kvloom.contract.config import EngineConfig


class PromptLookup:
    """The n-grams of one sequence and where each was last seen. Owned by the engine thread.

    Drafts grow while they are right and shrink when they are wrong, so that text without repetition costs little.
    """

    def __init__(self, min_tokens: int, max_tokens: int, max_draft: int) -> None:
        """Looks for the last `max_tokens` tokens, then for fewer, down to `min_tokens`; drafts up to `max_draft`."""
        self._sizes = range(max_tokens, min_tokens - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> where its last occurrence but the current one ends
        self._num_indexed = 0  # n-grams that end at or before this position are in _ends
        self._max_draft = self._reach = max_draft

    def propose(self, token_ids: Sequence[int], max_draft: int) -> list[int]:
        """At most `max_draft` tokens that may follow; none when the end of `token_ids` was not seen before.

        token_ids: those of the call before, and more.
        """
        self._index(token_ids)
        count = min(self._reach, max_draft)
        for size in self._sizes:
            end = self._ends.get(tuple(token_ids[-size:])) if count > 0 and len(token_ids) > size else None
            if end is not None:
                return list(token_ids[end : end + count])
        return []

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """What became of a draft: the next is at most twice as long as what was right of it, and one more."""
        if num_drafted:
            self._reach = min(self._max_draft, 2 * num_accepted + 1)

    def _index(self, token_ids: Sequence[int]) -> None:
        """Enter the n-grams that end before the last token, so that the end of the sequence never finds itself."""
        for end in range(self._num_indexed + 1, len(token_ids)):
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(token_ids[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, len(token_ids) - 1)


def lookup_of(config: EngineConfig) -> PromptLookup | None:
    """What guesses for one sequence; None when guessing is off."""
    if not config.num_speculative_tokens:
        return None
    return PromptLookup(config.prompt_lookup_min, config.prompt_lookup_max, config.num_speculative_tokens)
