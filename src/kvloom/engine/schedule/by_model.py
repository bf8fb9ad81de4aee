"""Guesses of a draft model: how often they are right, and what they cost. Pure.

The draft model guesses for all sequences of a step together, in passes one after the other, each of which gives a
sequence one token more. A pass costs something by itself, which the sequences that draft share, and something for each
of them. What the draft model has not read of a text it reads before its first guess; a token is read once, so only a
part of that is a guess's own.
"""

from typing import NamedTuple

from kvloom.contract.messages import DraftLoad
from kvloom.engine.schedule.cost import Load, StepCost
from kvloom.engine.schedule.seq import Seq

MOST_BY_MODEL = 16  # tokens of a guess
_FIRST_CHANCE = 0.7  # of a token to be right, before any was seen
_FIRST_WEIGHT, _OWN_WEIGHT = 4.0, 8.0  # guesses that what is believed first counts as: of all sequences, and of one
_DECAY, _OWN_DECAY = 0.99, 0.93  # of what is known of earlier guesses, with each new one
_REST = 0.995  # the same with each step that drafts nothing by model: what did not pay is tried again, rarely
_SPREAD = 512  # guesses that share the reading of a text, if the answer may have as many


class Belief:
    """How likely a guess is right: of one sequence, or of all (`others` is None)."""

    def __init__(self, others: "Belief | None" = None) -> None:
        self._others = others
        self._weight, self._decay = (_FIRST_WEIGHT, _DECAY) if others is None else (_OWN_WEIGHT, _OWN_DECAY)
        self._right = self._count = 0.0

    @property
    def chance(self) -> float:
        """Of one token, if those before it are right."""
        first = _FIRST_CHANCE if self._others is None else self._others.chance
        return (self._right + self._weight * first) / (self._count + self._weight)

    def learn(self, is_right: bool) -> None:
        """A guess was right or wrong; the others are told too."""
        self._right, self._count = self._decay * self._right + is_right, self._decay * self._count + 1
        if self._others is not None:
            self._others.learn(is_right)

    def rest(self) -> None:
        """Nothing is drafted: forget a little."""
        self._right, self._count = _REST * self._right, _REST * self._count


class Price(NamedTuple):
    """What guesses of the draft model cost a sequence: seconds of each behind the first `num_given` of its draft."""

    pass_s: float
    num_given: int


FREE = Price(0.0, 0)  # of guesses from texts


class ModelCost:
    """What the draft model's passes cost, learned from those that were made. Before the first they seem free."""

    def __init__(self) -> None:
        self._cost = StepCost()

    def learn(self, load: DraftLoad) -> None:
        """Learn what the passes of a step took."""
        self._cost.learn(Load(load.num_tokens, load.num_samples, load.num_pairs, load.num_passes), load.seconds)

    def price(self, seq: Seq, num_read: int, num_given: int, num_sharing: int) -> Price:
        """Of one sequence, of which the draft model has read `num_read` tokens, where `num_sharing` draft together."""
        if not self._cost.is_known:
            return Price(0.0, num_given)
        token_s, count = self._cost.token_s or 0.0, len(seq.token_ids)
        spread = max(1, min(_SPREAD, seq.max_len - count))
        reading_s = max(0, count - num_read) * token_s / spread
        return Price(self._cost.step_alone_s / num_sharing + self._cost.row_s(seq) + reading_s, num_given)

    def room(self, limit_s: float) -> int:
        """Tokens of texts that may be read in `limit_s`."""
        token_s = self._cost.token_s
        return int(limit_s / token_s) if token_s else 0
