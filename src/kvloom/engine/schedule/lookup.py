"""Prompt lookup: guesses the tokens that followed the last occurrence of the same n-gram, in prompt or answer. Pure.

A drafted guess costs rows of the next step and never changes the answer: the rank samples every position as it would
have without drafts, and a drafted token counts only where it equals the sampled one (Leviathan et al. 2023 with a table
as draft model; Yang et al. 2023, LLMA). profit.py decides how many tokens are drafted.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvloom.contract.config import EngineConfig
from kvloom.contract.messages import RankInfo

MOST_TOKENS = 32  # of a guess, if nothing else is said: an edit copies long runs
_INDEXED_TOKENS = 1 << 16  # of a sequence, its last ones
_DECAY = 0.9  # of what is known of earlier guesses, with each new one
# by the bit length of the number of tokens that agree: (right, all) guesses of one token that count before any was seen
_PRIOR = ((0.3, 2.0), (0.3, 2.0), (0.9, 2.0), (2.25, 3.0), (5.5, 6.0))


class Guess(NamedTuple):
    """Tokens that may follow, because the `size` tokens before them agree."""

    tokens: Sequence[int] = ()
    size: int = 0


class PromptLookup:
    """The n-grams of one sequence and where each occurred last. Owned by the engine's thread."""

    def __init__(self, min_tokens: int, max_tokens: int, before: Sequence[int] = ()) -> None:
        """Looks up the last `max_tokens` tokens, then half as many, and so on; never fewer than `min_tokens`.
        `before`: other text, as if it stood before the sequence.
        """
        self._sizes = [max_tokens]
        while self._sizes[-1] > min_tokens:
            self._sizes.append(max(min_tokens, self._sizes[-1] // 2))
        # hash of an n-gram -> end of its last occurrence before the current one; a collision is a bad guess
        self._ends: dict[int, int] = {}
        self._num_indexed = 0  # n-grams that end at or before this position are in _ends
        self._before = before
        self._ends_before = {
            hash(tuple(before[end - size : end])): end
            for end in range(len(before))
            for size in self._sizes
            if size <= end
        }

    def propose(self, token_ids: Sequence[int], most: int) -> Guess:
        """At most `most` tokens that may follow; none when no n-gram at the end of `token_ids` occurred before.

        `token_ids` must extend those of the last call.
        """
        self._index(token_ids)
        for size in self._sizes if most > 0 else ():
            key = hash(tuple(token_ids[-size:]))
            if (end := self._ends_before.get(key)) is not None:
                return Guess(self._before[end : end + most], size)
            if len(token_ids) > size and (end := self._ends.get(key)) is not None:
                return Guess(token_ids[end : end + most], size)
        return Guess()

    def _index(self, token_ids: Sequence[int]) -> None:
        """Enter n-grams that end before the last token, so that the end of the sequence never finds itself."""
        ends = self._ends
        for end in range(max(self._num_indexed + 1, len(token_ids) - _INDEXED_TOKENS), len(token_ids)):
            for size in self._sizes:
                if size <= end:
                    ends[hash(tuple(token_ids[end - size : end]))] = end
        self._num_indexed = max(self._num_indexed, len(token_ids) - 1)


class Guesser:
    """The guess for one sequence, and how often guesses were right, drafted or not. Owned by the engine's thread."""

    def __init__(self, lookup: PromptLookup, most: int) -> None:
        """`most`: tokens of a guess."""
        self._lookup, self._most = lookup, most
        self._num_known = 0  # tokens of the sequence at the last guess
        self._known = list(_PRIOR)
        self.guess = Guess()

    def follow(self, token_ids: Sequence[int], most: int) -> None:
        """Learn from the tokens that have come since the last call, and guess at most `most` tokens that follow."""
        self._learn(token_ids[self._num_known :] if self.guess.tokens else ())
        self._num_known = len(token_ids)
        self.guess = self._lookup.propose(token_ids, min(most, self._most))

    def chances(self) -> list[float]:
        """For each token of the guess how likely it is that it and all before it are right."""
        found, chance, size = [], 1.0, self.guess.size
        for _ in self.guess.tokens:
            right, count = self._known[_class_of(size)]
            chance *= right / count
            found.append(chance)
            size += 1
        return found

    def _learn(self, fresh: Sequence[int]) -> None:
        size = self.guess.size
        for guessed, token in zip(self.guess.tokens, fresh, strict=False):
            own, is_right = _class_of(size), guessed == token
            right, count = self._known[own]
            self._known[own] = _DECAY * right + is_right, _DECAY * count + 1
            size += 1
            if not is_right:
                return


def _class_of(size: int) -> int:
    return min(size.bit_length(), len(_PRIOR) - 1)


def guesser_of(config: EngineConfig, info: RankInfo, before: Sequence[int]) -> Guesser | None:
    """Of one sequence, which may go on as `before`; None when speculation is off, or a rejected draft would stay in a
    state.
    """
    if not config.num_speculative_tokens or info.num_states:
        return None
    most = config.num_speculative_tokens if config.num_speculative_tokens > 0 else MOST_TOKENS
    return Guesser(PromptLookup(config.prompt_lookup_min, config.prompt_lookup_max, before), most)
