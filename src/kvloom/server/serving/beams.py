"""Beam search as in vLLM 0.2.6: finds the most likely answers with `width` beams. Pure: the caller asks the engine.

A score is the sum of log-probabilities over length ** length_penalty; the length includes the prompt, and excludes the
end-of-sequence token.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvloom.contract.request import FinishReason, TokenLogprob

End = tuple[FinishReason, str | int | None]  # finish reason, and the stop string or token that matched


@dataclass(frozen=True, slots=True)
class Beams:
    """early_stopping: True = stop at `width` answers; False = stop when no beam is better than these now; "never" =
    stop when no beam can become better.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """The beginning of an answer, or a whole one when it has an end."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    total: float = 0.0  # sum of log-probabilities
    end: End | None = None

    def score(self, beams: Beams, num_prompt: int, length: int | None = None) -> float:
        """`length`: in tokens, instead of its own."""
        own = num_prompt + len(self.token_ids) - (self.end is not None and self.end[0] is FinishReason.EOS)
        return self.total / math.pow(length or own, beams.length_penalty)


class BeamSearch:
    """Extends `live` step by step: call `take` with the next tokens of each until `is_over`."""

    def __init__(
        self, beams: Beams, num_prompt: int, max_tokens: int, end_of: Callable[[tuple[int, ...]], End | None]
    ) -> None:
        """`end_of`: finish reason of an answer with these tokens, or None."""
        self.live = [Hypothesis()]
        self._beams, self._num_prompt, self._max_tokens, self._end_of = beams, num_prompt, max_tokens, end_of
        self._ended: list[Hypothesis] = []  # the best finished answers, best first

    @property
    def is_over(self) -> bool:
        return not self.live or len(self.live[0].token_ids) >= self._max_tokens or self._is_settled

    @property
    def _is_settled(self) -> bool:
        """Whether no live beam can change the result."""
        if not self.live or len(self._ended) < self._beams.width:
            return False
        return self._beams.early_stopping is True or self._score(self._ended[-1]) >= self._attainable()

    def take(self, following: Sequence[TokenLogprob]) -> None:
        """`following`: the most likely next token of each live beam, with the 2 * width most likely ones as `top`."""
        grown = [
            Hypothesis(
                (*beam.token_ids, token_id),
                (*beam.logprobs, replace(next, token_id=token_id, logprob=logprob)),
                beam.total + logprob,
            )
            for beam, next in zip(self.live, following, strict=True)
            for token_id, logprob in next.top
        ]
        grown.sort(key=lambda one: -one.total)
        self.live = []
        for one in grown[: 2 * self._beams.width]:
            end = self._end_of(one.token_ids)
            if end is not None:
                self._ended.append(replace(one, end=end))
            elif len(self.live) < self._beams.width:
                self.live.append(one)
        self._ended = self._best(self._ended, self._beams.width)

    def best(self, count: int, cut: FinishReason = FinishReason.LENGTH) -> list[Hypothesis]:
        """The `count` best answers. Unfinished beams count as cut, unless the search ended without them."""
        is_settled = self._is_settled and len(self.live[0].token_ids) < self._max_tokens
        cuts = [] if is_settled else [replace(one, end=(cut, None)) for one in self.live]
        return self._best([*self._ended, *cuts], count)

    def _best(self, found: list[Hypothesis], count: int) -> list[Hypothesis]:
        return sorted(found, key=lambda one: -self._score(one))[:count]

    def _score(self, one: Hypothesis) -> float:
        return one.score(self._beams, self._num_prompt)

    def _attainable(self) -> float:
        """The best score that a live beam has, or may reach when early_stopping is "never"."""
        best = max(self.live, key=self._score)
        if self._beams.early_stopping == "never" and self._beams.length_penalty > 0:
            return best.score(self._beams, self._num_prompt, self._num_prompt + self._max_tokens)
        return self._score(best)
