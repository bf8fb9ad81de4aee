"""Cost: what a step takes, learned from the steps that were made. Pure: the same steps teach the same.

A step's time is a sum of parts, each an amount of its load times what one of it costs, never negative. The costs are
those of a Kalman filter whose state drifts: what a step has in common with earlier ones is known well and moves
little, what was not seen for long is believed less and learned at once. Errors are relative to the longer of what
was expected and what was measured, so that a step that somebody else held up, however long, moves little.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from kvloom.engine.schedule.seq import Plan, Seq

_USUAL = (10.0, 1.0, 0.5, 0.2)  # what the parts cost, in tokens, before more than one step was seen
_LEAST_S = 1e-9  # a step takes some time
_NOISE = 0.1  # of a step's time, relative
_SPEED_DRIFT = 0.02  # by which all costs may change from one step to the next, relative
_DRIFT = 0.005  # and each by itself, relative to what is usual


@dataclass(frozen=True, slots=True)
class Load:
    """What a step computes."""

    num_tokens: int
    num_samples: int  # rows whose logits are wanted
    num_pairs: int  # of a query and a key that it attends to

    def amounts(self) -> tuple[float, float, float, float]:
        """Of the parts: a step, its tokens, its samples, 1000 pairs."""
        return 1.0, self.num_tokens, self.num_samples, self.num_pairs / 1000


def load_of(plan: Plan) -> Load:
    """What a plan computes; to be called before the plan is committed."""
    tokens = samples = pairs = 0
    for step in plan.steps:
        count = step.num_tokens
        tokens += count
        pairs += pairs_of(step.start, count)
        if step.seq.is_scored and step.start < step.seq.num_prompt:
            samples += count
        elif step.start + count >= len(step.seq.token_ids):
            samples += 1 + len(step.draft)
    return Load(tokens, samples, pairs)


def decode_load(seqs: Sequence[Seq], max_draft_tokens: int) -> Load:
    """A step that computes the next token of each of `seqs`, and what is guessed to follow."""
    drafted = min(max_draft_tokens, sum(len(seq.draft) for seq in seqs))
    count = len(seqs) + drafted
    return Load(count, count, sum(len(seq.token_ids) for seq in seqs))


def pairs_of(start: int, count: int) -> int:
    """Pairs of `count` tokens from position `start` with themselves and all before them."""
    return count * start + count * (count + 1) // 2


class StepCost:
    """Knows nothing at first, and the usual proportions after one step."""

    def __init__(self) -> None:
        self._parts: list[float] = []  # seconds of each
        self._spread: list[list[float]] = []  # their covariance

    @property
    def is_known(self) -> bool:
        return bool(self._parts)

    @property
    def token_s(self) -> float | None:
        """Of one more token of a prompt, attention left out."""
        return self._parts[1] if self._parts else None

    def step_s(self, load: Load) -> float:
        """Foretold seconds of a step; something must have been learned."""
        return _dot(self._parts, load.amounts())

    def prompt_s(self, seq: Seq, count: int) -> float:
        """What the next `count` tokens of a prompt add to a step."""
        _, token_s, sample_s, kilopair_s = self._parts
        return count * (token_s + seq.is_scored * sample_s) + pairs_of(seq.next_start, count) / 1000 * kilopair_s

    def num_fitting(self, seq: Seq, room_s: float) -> int:
        """The most tokens of a prompt that add no more than `room_s` to a step; all that are pending at most."""
        if room_s <= 0:
            return 0
        _, token_s, sample_s, kilopair_s = self._parts
        linear_s = token_s + seq.is_scored * sample_s + kilopair_s * (seq.next_start + 0.5) / 1000
        square_s = kilopair_s / 2000
        root = linear_s + math.sqrt(linear_s**2 + 4 * square_s * room_s)  # of linear n + square n² = room
        return seq.num_pending if 2 * room_s >= root * seq.num_pending else int(2 * room_s / root)

    def learn(self, load: Load, seconds: float) -> None:
        """A step of that load has taken so long."""
        if not load.num_tokens:
            return
        amounts, seconds = load.amounts(), max(seconds, _LEAST_S)
        if not self._parts:
            unit_s = seconds / _dot(_USUAL, amounts)
            self._parts = [unit_s * usual for usual in _USUAL]
            self._spread = [[part**2 * (i == j) for j in range(4)] for i, part in enumerate(self._parts)]
            return
        expected_s = _dot(self._parts, amounts)
        self._drift(expected_s / _dot(_USUAL, amounts))
        scale_s = max(seconds, expected_s)
        row = [amount / scale_s for amount in amounts]
        self._move(row, (seconds - expected_s) / scale_s, _NOISE**2)
        while min(self._parts) < 0:  # then it is 0, and the others are what they are given that
            worst = min(range(4), key=self._parts.__getitem__)
            self._move([float(i == worst) for i in range(4)], -self._parts[worst], 0.0)
            self._parts[worst] = 0.0
            for i in range(4):
                self._spread[worst][i] = self._spread[i][worst] = 0.0

    def _move(self, row: Sequence[float], error: float, noise: float) -> None:
        """The parts were seen through `row`, in a sum that is larger by `error` than was thought."""
        shared = [_dot(line, row) for line in self._spread]
        variance = _dot(shared, row) + noise
        self._parts = [part + s / variance * error for part, s in zip(self._parts, shared, strict=True)]
        self._spread = [
            [value - s * t / variance for value, t in zip(line, shared, strict=True)]
            for line, s in zip(self._spread, shared, strict=True)
        ]

    def _drift(self, unit_s: float) -> None:
        """Since the last step the machine may be faster or slower, and each cost a little different by itself."""
        self._spread = [
            [value + _SPEED_DRIFT**2 * one * other for value, other in zip(line, self._parts, strict=True)]
            for line, one in zip(self._spread, self._parts, strict=True)
        ]
        for i, usual in enumerate(_USUAL):
            most = max(self._parts[i], unit_s * usual) ** 2  # as if nothing were known
            self._spread[i][i] += _DRIFT**2 * most
            if self._spread[i][i] > most:
                share = math.sqrt(most / self._spread[i][i])
                for j in range(4):
                    self._spread[i][j] *= share
                    self._spread[j][i] *= share


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    product: float = sum(map(mul, left, right))
    return product
