"""Cost: how long a step takes, learned from the steps that were made. Pure: the same steps teach the same.

A step's time is modelled as a sum over the amounts of its load, each times a cost per unit that is never negative. The
costs are the state of a Kalman filter with drift: what a step shares with earlier ones is known well and moves little;
what was not seen for long is uncertain and learned at once. Errors are relative to the larger of the expected and the
measured time, so a step that was delayed from outside, however long, moves the costs little. Where many steps take
longer than expected, they were not delayed: then a cost that is believed too low drifts as fast as one too high.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvloom.engine.schedule.seq import Plan, Seq

_USUAL = (10.0, 1.0, 0.5, 0.2)  # assumed costs, in tokens, before more than one step was seen
_LEAST_S = 1e-9  # of any step, however small
_NOISE = 0.1  # standard deviation of a step's time, relative
_SPEED = 0.02**2  # variance that all costs gain together from one step to the next, relative
_OWN = 0.005**2  # and each one by itself, relative to its usual value
_SURPRISE = 3 * _NOISE  # a step that takes so much longer than expected, relative, is a surprise
_NEWS, _KEPT = 0.2, 0.92  # a surprise and any other step move the share of surprises by these
_OFTEN, _AT_MOST = 0.5, 1000.0  # where surprises are more often than this, costs drift by up to so much more
# of a symmetric matrix, whose upper triangle is kept in a list
_ROWS = ((0, 1, 2, 3), (1, 4, 5, 6), (2, 5, 7, 8), (3, 6, 8, 9))

Four = tuple[float, float, float, float]  # one number a part


class Load(NamedTuple):
    """What a step computes."""

    num_tokens: int
    num_samples: int  # rows whose logits are computed
    num_pairs: int  # (query, key) pairs of attention
    num_steps: int = 1

    def amounts(self) -> Four:
        """Amounts that the costs are multiplied with: steps, tokens, samples, thousands of pairs."""
        return self.num_steps, self.num_tokens, self.num_samples, self.num_pairs / 1000


def load_of(plan: Plan) -> Load:
    """The load of a plan. Call it before the plan is committed."""
    tokens = samples = pairs = 0
    for step in plan.steps:
        count = step.num_tokens
        tokens += count
        pairs += pairs_of(step.start, count)
        if (scored := step.seq.num_scored(step.start, count)) > 0:
            samples += scored
        elif step.start + count >= len(step.seq.token_ids):
            samples += 1 + len(step.draft)
    return Load(tokens, samples, pairs)


def decode_load(seqs: Sequence[Seq], max_draft_tokens: int) -> Load:
    """The load of a step that decodes each of `seqs`, drafts included."""
    drafted = min(max_draft_tokens, sum(len(seq.draft) for seq in seqs))
    count = len(seqs) + drafted
    return Load(count, count, sum(len(seq.token_ids) for seq in seqs))


def pairs_of(start: int, count: int) -> int:
    """Attention pairs of `count` tokens from position `start` with themselves and all before them."""
    return count * start + count * (count + 1) // 2


class StepCost:
    """Costs of the parts of a step. Knows nothing at first, and the usual proportions after one step."""

    def __init__(self) -> None:
        self._parts: Four = (0.0, 0.0, 0.0, 0.0)  # seconds per unit of each part
        self._spread: list[float] = []  # their covariance, its rows as in _ROWS
        self._surprises = 0.0  # share of the last steps that took longer than expected

    @property
    def is_known(self) -> bool:
        return bool(self._spread)

    @property
    def token_s(self) -> float | None:
        """Seconds of one more prompt token, without attention."""
        return self._parts[1] if self._spread else None

    @property
    def step_alone_s(self) -> float:
        """Seconds of a step by itself, without what it computes."""
        return self._parts[0]

    def step_s(self, load: Load) -> float:
        """Predicted seconds of a step. Needs at least one learned step."""
        return _dot(self._parts, load.amounts())

    def row_s(self, seq: Seq) -> float:
        """Predicted seconds that one more sampled token of a decoding sequence adds to a step."""
        _, token_s, sample_s, kilopair_s = self._parts
        return token_s + sample_s + kilopair_s * len(seq.token_ids) / 1000

    @property
    def least_row_s(self) -> float:
        """The same of a sequence without a token."""
        return self._parts[1] + self._parts[2]

    def prompt_s(self, seq: Seq, count: int) -> float:
        """Predicted seconds that the next `count` tokens of a prompt add to a step."""
        _, token_s, sample_s, kilopair_s = self._parts
        return count * (token_s + seq.is_scored * sample_s) + pairs_of(seq.next_start, count) / 1000 * kilopair_s

    def num_fitting(self, seq: Seq, room_s: float) -> int:
        """The most prompt tokens of `seq` that add at most `room_s` to a step; never more than are pending."""
        if room_s <= 0:
            return 0
        _, token_s, sample_s, kilopair_s = self._parts
        linear_s = token_s + seq.is_scored * sample_s + kilopair_s * (seq.next_start + 0.5) / 1000
        square_s = kilopair_s / 2000
        root = linear_s + math.sqrt(linear_s**2 + 4 * square_s * room_s)  # solves linear * n + square * n**2 = room
        return seq.num_pending if 2 * room_s >= root * seq.num_pending else int(2 * room_s / root)

    def learn(self, load: Load, seconds: float) -> None:
        """Learn that a step of this load took `seconds`."""
        if not load.num_tokens:
            return
        amounts, seconds = load.amounts(), max(seconds, _LEAST_S)
        if not self._spread:
            unit_s = seconds / _dot(_USUAL, amounts)
            one, token, sample, kilopair = (unit_s * usual for usual in _USUAL)
            self._parts = one, token, sample, kilopair
            self._spread = [one**2, 0.0, 0.0, 0.0, token**2, 0.0, 0.0, sample**2, 0.0, kilopair**2]
            return
        expected_s = _dot(self._parts, amounts)
        scale_s = max(seconds, expected_s)
        is_surprise = seconds - expected_s > _SURPRISE * scale_s
        self._surprises = self._surprises + _NEWS * (1 - self._surprises) if is_surprise else _KEPT * self._surprises
        self._drift(expected_s / _dot(_USUAL, amounts))
        one, token, sample, kilopair = amounts
        seen = one / scale_s, token / scale_s, sample / scale_s, kilopair / scale_s
        self._move(seen, (seconds - expected_s) / scale_s, _NOISE**2)
        while min(self._parts) < 0:  # set it to 0, and let the others explain the rest
            worst = min(range(4), key=self._parts.__getitem__)
            self._move(_only(1.0, worst), -self._parts[worst], 0.0)
            one, token, sample, kilopair = (part * (i != worst) for i, part in enumerate(self._parts))
            self._parts = one, token, sample, kilopair
            for i in _ROWS[worst]:
                self._spread[i] = 0.0

    def _move(self, seen: Four, error: float, noise: float) -> None:
        """Update the costs by an observation `seen` whose predicted time was too small by `error` seconds."""
        a, b, c, d = seen
        aa, ab, ac, ad, bb, bc, bd, cc, cd, dd = self._spread
        at_a, at_b = aa * a + ab * b + ac * c + ad * d, ab * a + bb * b + bc * c + bd * d
        at_c, at_d = ac * a + bc * b + cc * c + cd * d, ad * a + bd * b + cd * c + dd * d
        variance = at_a * a + at_b * b + at_c * c + at_d * d + noise
        by_a, by_b, by_c, by_d = at_a / variance, at_b / variance, at_c / variance, at_d / variance
        one, token, sample, kilopair = self._parts
        self._parts = one + by_a * error, token + by_b * error, sample + by_c * error, kilopair + by_d * error
        self._spread = [
            *(aa - by_a * at_a, ab - by_a * at_b, ac - by_a * at_c, ad - by_a * at_d),
            *(bb - by_b * at_b, bc - by_b * at_c, bd - by_b * at_d),
            *(cc - by_c * at_c, cd - by_c * at_d),
            dd - by_d * at_d,
        ]

    def _drift(self, unit_s: float) -> None:
        """Increase the uncertainty: since the last step the machine may have become faster or slower."""
        a, b, c, d = self._parts
        aa, ab, ac, ad, bb, bc, bd, cc, cd, dd = self._spread
        all_a, all_b, all_c, all_d = _SPEED * a, _SPEED * b, _SPEED * c, _SPEED * d
        spread = self._spread = [
            *(aa + all_a * a, ab + all_a * b, ac + all_a * c, ad + all_a * d),
            *(bb + all_b * b, bc + all_b * c, bd + all_b * d),
            *(cc + all_c * c, cd + all_c * d),
            dd + all_d * d,
        ]
        own = _OWN * max(1.0, _AT_MOST * (self._surprises - _OFTEN) / (1 - _OFTEN))
        for i, row in enumerate(_ROWS):
            most = max(self._parts[i], unit_s * _USUAL[i]) ** 2  # no more than when nothing was known
            known = spread[row[i]] + own * most
            if known > most:
                share = math.sqrt(most / known)
                for j in row:
                    spread[j] *= share
            spread[row[i]] = min(known, most)


def _only(value: float, part: int) -> Four:
    one, token, sample, kilopair = (value * (i == part) for i in range(4))
    return one, token, sample, kilopair


def _dot(left: Four, right: Four) -> float:
    a, b, c, d = left
    one, token, sample, kilopair = right
    return a * one + b * token + c * sample + d * kilopair
