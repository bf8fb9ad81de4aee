"""Guesses: tokens that may follow a sequence, from several sources, and how likely each is right. Pure.

A drafted guess costs rows of the next step and never changes the answer: the rank samples every position as it would
have without drafts, and a drafted token counts only where it equals the sampled one (Leviathan et al. 2023 with any
source as draft model). profit.py decides how many tokens are drafted.

A guess begins with the tokens that a grammar forces, if there are any. It goes on with what the text says, or with
what a recent text of the same scope says, whichever is believed to bring more. A draft model may take their place; its
tokens are known only when the rank has drafted them.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from kvloom.contract.config import EngineConfig
from kvloom.contract.messages import BY_MODEL, Drafted
from kvloom.contract.request import Request
from kvloom.engine.schedule.by_model import MOST_BY_MODEL, Belief
from kvloom.engine.schedule.lookup import Match, PromptLookup
from kvloom.engine.schedule.recent import Recent
from kvloom.engine.schedule.seq import Seq

MOST_TOKENS = 32  # of a guess, if nothing else is said: an edit copies long runs
_DECAY = 0.9  # of what is known of earlier guesses, with each new one
# By kind: (right, all) guesses of one token that count before any was seen. First those of a lookup, by the bit length
# of the number of tokens that agree;
_BY_AGREEMENT = ((0.3, 2.0), (0.3, 2.0), (0.9, 2.0), (2.25, 3.0), (5.5, 6.0))
BEHIND = len(_BY_AGREEMENT)  # then those of a lookup that begins behind forced tokens;
RECENT = 2 * BEHIND  # then those of recent texts;
FORCED = 3 * BEHIND  # then those that a grammar forces: the sampler can choose no other, however the text is cut
MODEL = FORCED + 1  # and those of a draft model, of which by_model.py knows more
_PRIOR = (*_BY_AGREEMENT, *_BY_AGREEMENT, *_BY_AGREEMENT, (39.6, 40.0))
_START_NEWS = 0.1  # share of the newest step in the share of steps behind which a draft begins


class Guess(NamedTuple):
    """Tokens that may follow, and of which kind each is."""

    tokens: Sequence[int] = ()
    kinds: Sequence[int] = ()


class Guesser:
    """The guess for one sequence, and how often guesses were right, drafted or not. Owned by the engine's thread."""

    def __init__(
        self,
        lookup: PromptLookup,
        most: int,
        recent: Recent | None = None,
        scope: Hashable = None,
        model: Belief | None = None,
    ) -> None:
        """`most`: tokens of a guess. `recent` has other texts, and `scope` says which of them may be read. `model`:
        what is believed of the draft model's guesses for all sequences; None = there is none.
        """
        self._lookup, self._most = lookup, most
        self._recent, self._scope = recent or Recent(), scope
        self._num_known = 0  # tokens of the sequence at the last guess
        self._known = list(_PRIOR)
        self._is_drafting = False
        self.guess = self._by_text = Guess()
        self.by_model = Guess()
        self._model = Belief(model) if model is not None else None
        self.num_read: int | None = None  # tokens of the sequence that the draft model has read; None = unknown
        self.start_share = 0.0  # of its steps, those behind which a draft begins, each as likely as it is right

    def follow(
        self, token_ids: Sequence[int], most: int, forced: Sequence[int] = (), drafted: Drafted | None = None
    ) -> None:
        """Learn from the tokens that have come since the last call, and guess at most `most` tokens that follow.

        `forced`: the first of them, which a grammar forces. `drafted`: what the draft model made of the last guess.
        """
        fresh = token_ids[self._num_known :] if self._num_known else ()
        self._learn(fresh)
        if drafted is not None:
            self.num_read = min(drafted.num_known, len(token_ids) - 1)
            self._learn_drafted(drafted, fresh)
        self._num_known = len(token_ids)
        most = min(most, self._most)
        forced = forced[: max(0, most)]
        left = most - len(forced)
        own = _guess_of(self._lookup.propose(token_ids, left, forced), BEHIND if forced else 0)
        last = [*token_ids[-self._lookup.max_size :], *forced]
        other = _guess_of(self._recent.find(self._scope, last, left), RECENT)
        tokens, kinds = other if sum(self._chances(other.kinds)) > sum(self._chances(own.kinds)) else own
        self.guess = self._by_text = Guess([*forced, *tokens], [*[FORCED] * len(forced), *kinds])
        if self._model is not None:
            count = min(left, MOST_BY_MODEL)
            kinds = [*[FORCED] * len(forced), *[MODEL] * count]
            self.by_model = Guess([*forced, *[BY_MODEL] * count], kinds)

    def chances(self) -> list[float]:
        """For each token of the guess how likely it is that it and all before it are right."""
        return self._chances(self.guess.kinds)

    def text_chances(self) -> list[float]:
        """The same of what the texts say, whichever guess was chosen,"""
        return self._chances(self._by_text.kinds)

    def model_chances(self) -> list[float]:
        """and of the guess that the draft model would make."""
        return self._chances(self.by_model.kinds)

    def choose(self, by_model: bool) -> None:
        """The guess is the draft model's, or that of the texts."""
        self.guess = self.by_model if by_model else self._by_text

    @property
    def is_by_model(self) -> bool:
        return MODEL in self.guess.kinds

    def leave(self, token_ids: Sequence[int]) -> None:
        """The sequence has ended with these tokens, which do not change any more: later ones may be guessed from it.

        One that has got no token is forgotten.
        """
        if self._num_known:
            self._lookup.index(token_ids)
            self._recent.keep(self._scope, token_ids, self._lookup)

    def _chances(self, kinds: Sequence[int]) -> list[float]:
        found, chance = [], 1.0
        for kind in kinds:
            chance *= self._chance(kind)
            found.append(chance)
        return found

    def decided(self, num_drafted: int) -> None:
        """So many tokens of the guess pay."""
        if self._model is not None and not (num_drafted and self.is_by_model):
            self._model.rest()
        start = self.chances()[0] if num_drafted > 0 and not self._is_drafting else 0.0
        self._is_drafting = num_drafted > 0
        self.start_share += _START_NEWS * (start - self.start_share)

    def _learn(self, fresh: Sequence[int]) -> None:
        for guessed, kind, token in zip(*self._by_text, fresh, strict=False):
            is_right = guessed == token
            right, count = self._known[kind]
            self._known[kind] = _DECAY * right + is_right, _DECAY * count + 1
            if not is_right:
                return

    def _learn_drafted(self, drafted: Drafted, fresh: Sequence[int]) -> None:
        assert self._model is not None, "a rank drafts by model where it is asked to"
        for guessed, kind, token in zip(drafted.token_ids, self.by_model.kinds, fresh, strict=False):
            if kind == MODEL:
                self._model.learn(guessed == token)

    def _chance(self, kind: int) -> float:
        if kind == MODEL and self._model is not None:
            return self._model.chance
        right, count = self._known[kind]
        return right / count


def _class_of(size: int) -> int:
    return min(size.bit_length(), len(_BY_AGREEMENT) - 1)


def _guess_of(match: Match, first: int) -> Guess:
    return Guess(match.tokens, [first + _class_of(match.size + i) for i in range(len(match.tokens))])


def guesser_of(
    config: EngineConfig, request: Request, seq: Seq, recent: Recent, model: Belief | None = None
) -> Guesser | None:
    """Of the sequence `seq` of `request`; None when speculation is off, or nothing is generated.

    Texts of another tenant, another salt or another adapter are not read.
    """
    if not config.num_speculative_tokens or request.pooling:
        return None
    most = config.num_speculative_tokens if config.num_speculative_tokens > 0 else MOST_TOKENS
    sizes = config.prompt_lookup_min, config.prompt_lookup_max
    lookup = PromptLookup(*sizes, request.prediction, is_guided=bool(request.params.grammar))
    scope = request.tenant, seq.salt, seq.switch.digest if seq.switch is not None else ""
    return Guesser(lookup, most, recent, scope, model)
