"""Profit: how many guessed tokens a step computes along, so that tokens come as fast as they can. Pure.

A step of n sequences takes base seconds and brings n tokens. A drafted token makes the step longer by a row, and brings
a token more as often as it, and all drafted before it, are right. So a row pays where it brings more tokens a second
than the whole step does. Drafts follow from the last token; a step with drafts therefore cannot be sent while the one
before it is under way, and costs the time between two such steps, too.
"""

from collections.abc import Sequence
from typing import NamedTuple

_NEWS = 0.1  # share of the newest turnaround in what is believed of them
STRETCH = 2.0  # times its own length that a step may become longer where others stream beside the drafts


class Bid(NamedTuple):
    """What drafts of one sequence bring: `chances` of each token that it and all before it are right, never growing;
    and cost: seconds of one row. `goes_back`: after a wrong one all tokens of the step up to it are computed again.
    Each but the first `num_given` takes `pass_s` more, for a draft model to guess it.
    """

    chances: Sequence[float]
    row_s: float
    goes_back: bool = False
    pass_s: float = 0.0
    num_given: int = 0

    def rates(self) -> list[tuple[float, float]]:
        """(tokens a second, seconds) of each row, in order; the former never grow.

        With `goes_back` the n-th row raises what is computed again by n rows as often as the draft is right up to the
        one before it and wrong there.
        """
        found: list[tuple[float, float]] = []
        before = 1.0
        for n, chance in enumerate(self.chances, start=1):
            row_s = self.row_s * (1 + n * (before - chance) * self.goes_back)
            row_s = max(row_s + self.pass_s * (n > self.num_given), 1e-12)
            found.append((min(chance / row_s, found[-1][0]) if found else chance / row_s, row_s))
            before = chance
        return found


def best_rate(bid: Bid, base_s: float) -> float:
    """Tokens a second with the best number of drafted tokens, for a sequence whose share of the step is `base_s`."""
    best, num_tokens, step_s = 1 / base_s, 1.0, base_s
    for rate, row_s in bid.rates():
        num_tokens += rate * row_s
        step_s += row_s
        best = max(best, num_tokens / step_s)
    return best


class Base(NamedTuple):
    """A step of `num_seqs` sequences without drafts, which takes `seconds`. `gap_s`: seconds that pass before a step
    with drafts and before no other.
    """

    num_seqs: int
    seconds: float
    gap_s: float

    def least_chance(self, row_s: float, most: int) -> float:
        """A guessed token whose row takes `row_s` or more does not pay if it is less likely right. 1 if none pays,
        though each sequence drafted `most` tokens and all were right.
        """
        if most * (self.seconds - self.num_seqs * row_s) <= self.gap_s:
            return 1.0
        return self.num_seqs * row_s / (self.seconds + self.gap_s)


def draft_lengths(bids: Sequence[Bid], base: Base) -> list[int]:
    """How many tokens to draft for each bid. Sequences of the step that may not draft make no bid."""
    lengths = [0] * len(bids)
    rows = sorted((-rate, i, row_s) for i, bid in enumerate(bids) for rate, row_s in bid.rates())
    num_seqs, base_s = base.num_seqs, base.seconds
    num_tokens, step_s = float(num_seqs), base_s + base.gap_s
    longest_s = step_s + STRETCH * base_s if num_seqs > 1 else float("inf")
    for rate, i, row_s in rows:
        if -rate * step_s <= num_tokens or step_s + row_s > longest_s:
            break
        num_tokens += -rate * row_s
        step_s += row_s
        lengths[i] += 1
    return lengths if num_tokens * base_s > num_seqs * step_s else [0] * len(bids)


def pays_to_wait(start_shares: Sequence[float], base: Base) -> bool:
    """Whether steps of sequences that draft nothing now should wait for the tokens before them, in case that these
    bring guesses that pay. `start_shares`: for each how often they do; a step under way then brings one token where it
    could bring many.
    """
    return sum(start_shares) * base.seconds > base.num_seqs * base.gap_s


class Turnaround:
    """Seconds that a rank waits between two steps of which the second is sent when the first has ended."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._sent_s: float | None = None  # when the step under way was sent; None = behind another one
        self._ended_s: float | None = None  # when the last one ended; None = another was under way then
        self._between_s = 0.0

    def sent(self, now_s: float, is_alone: bool) -> None:
        """A step is sent; `is_alone`: none is under way."""
        self._sent_s = now_s if is_alone else None
        self._between_s = now_s - self._ended_s if is_alone and self._ended_s is not None else 0.0

    def ended(self, now_s: float, compute_s: float, waits: bool) -> None:
        """A step has ended that the rank computed for `compute_s`; `waits`: the rank has nothing to do, and sequences
        to go on with.
        """
        if self._sent_s is not None and self._between_s > 0:
            lost_s = self._between_s + max(0.0, now_s - self._sent_s - compute_s)
            self.seconds += _NEWS * (lost_s - self.seconds) if self.seconds else lost_s
        self._ended_s = now_s if waits else None
