"""Guesses: tokens that may follow a sequence, from several sources, and how likely each is right. Pure.

A drafted guess costs rows of the next step and never changes the answer: the rank samples every position as it would
have without drafts, and a drafted token counts only where it equals the sampled one (Leviathan et al. 2023 with any
source as draft model). profit.py decides how many tokens are drafted.

A guess begins with the tokens that a grammar forces, if there are any. It goes on with what the text says, or with
what a recent text of the same scope says, whichever is believed to bring more. A draft model may take their place; its
tokens are known only when the rank has drafted them.

What is right is learned from guesses whether they were drafted or not, so a guess is one token longer than it pays.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from kvloom.contract.config import EngineConfig
from kvloom.contract.messages import BY_MODEL, Drafted
from kvloom.contract.request import Request
from kvloom.engine.schedule.by_model import MOST_BY_MODEL, Belief
from kvloom.engine.schedule.lookup import LONG_TOKENS, Match, PromptLookup
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
_SHORT = [first + size for first in (0, RECENT) for size in range(1, LONG_TOKENS.bit_length())]  # by few tokens
_START_NEWS = 0.1  # share of the newest step in the share of steps behind which a draft begins


class Guess(NamedTuple):
    """Tokens that may follow, of which kind each is, and how likely it is that it and all before it are right."""

    tokens: Sequence[int] = ()
    kinds: Sequence[int] = ()
    chances: Sequence[float] = ()


class Bar(NamedTuple):
    """What a guessed token must reach to pay."""

    chance: float = 0.0  # one that is less likely right, together with all before it, does not
    is_learning: bool = True  # short n-grams are looked up also where their guesses do not, to learn whether they do


NO_GUESS, NO_BAR = Guess(), Bar()


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
        self._lookup, self.most = lookup, most
        self._recent, self._scope = recent or Recent(), scope
        self._num_known = 0  # tokens of the sequence at the last guess
        self._known = list(_PRIOR)
        self._chances = [right / count for right, count in _PRIOR]
        self._short_chance = max(self._chances[kind] for kind in _SHORT)
        self._is_drafting = False
        self.guess = self.by_text = self.by_model = NO_GUESS  # the chosen one; that of the texts; the draft model's
        self._model = Belief(model) if model is not None else None
        self.num_read: int | None = None  # tokens of the sequence that the draft model has read; None = unknown
        self.start_share = 0.0  # of its steps, those behind which a draft begins, each as likely as it is right

    def follow(
        self,
        token_ids: Sequence[int],
        most: int,
        forced: Sequence[int] = (),
        drafted: Drafted | None = None,
        bar: Bar = NO_BAR,
    ) -> None:
        """Learn from the tokens that have come since the last call, and guess at most `most` tokens that follow.

        `forced`: the first of them, which a grammar forces. `drafted`: what the draft model made of the last guess.
        """
        if self.by_text.tokens or drafted is not None:
            self._learn(token_ids[self._num_known :], drafted)
        if drafted is not None:
            self.num_read = min(drafted.num_known, len(token_ids) - 1)
        self._num_known = len(token_ids)
        most = min(most, self.most)
        forced = forced[: max(0, most)]
        left = most - len(forced)
        least = bar.chance
        only_long = not bar.is_learning and self._short_chance <= least
        own = self._lookup.propose(token_ids, left, forced, only_long)
        other = self._recent.find(self._scope, token_ids, left, forced, only_long)
        begun = self._longer(NO_GUESS, forced, [FORCED] * len(forced), 0.0) if forced else NO_GUESS
        self.by_text = self._by_match(begun, own, BEHIND if forced else 0, least) if own.tokens else begun
        if other.tokens:
            by_other = self._by_match(begun, other, RECENT, least)
            if sum(by_other.chances) > sum(self.by_text.chances):
                self.by_text = by_other
        self.guess = self.by_text
        if self._model is not None:
            count = min(left, MOST_BY_MODEL)
            self.by_model = self._longer(begun, [BY_MODEL] * count, [MODEL] * count, least)

    def choose(self, by_model: bool) -> None:
        """The guess is the draft model's, or that of the texts."""
        self.guess = self.by_model if by_model else self.by_text

    @property
    def is_by_model(self) -> bool:
        return MODEL in self.guess.kinds

    def leave(self, token_ids: Sequence[int]) -> None:
        """The sequence has ended with these tokens, which do not change any more: later ones may be guessed from it."""
        self._recent.keep(self._scope, token_ids, self._lookup)

    def decided(self, num_drafted: int) -> None:
        """So many tokens of the guess pay."""
        if self._model is not None and not (num_drafted and self.is_by_model):
            self._model.rest()
        start = self.guess.chances[0] if num_drafted > 0 and not self._is_drafting else 0.0
        self._is_drafting = num_drafted > 0
        self.start_share += _START_NEWS * (start - self.start_share)

    def _by_match(self, begun: Guess, match: Match, first: int, least: float) -> Guess:
        kinds = [first + _class_of(match.size + i) for i in range(len(match.tokens))]
        return self._longer(begun, match.tokens, kinds, least)

    def _longer(self, begun: Guess, tokens: Sequence[int], kinds: Sequence[int], least: float) -> Guess:
        """The guess that goes on with tokens of these kinds, up to the first that does not pay: that it was right may
        be learned.
        """
        chances = list(begun.chances)
        chance = chances[-1] if chances else 1.0
        known = self._model.chance if self._model is not None else 0.0
        for kind in kinds:
            if chance <= least:
                break
            chance *= known if kind == MODEL else self._chances[kind]
            chances.append(chance)
        count = len(chances) - len(begun.chances)
        return Guess([*begun.tokens, *tokens[:count]], [*begun.kinds, *kinds[:count]], chances)

    def _learn(self, fresh: Sequence[int], drafted: Drafted | None) -> None:
        for guessed, kind, token in zip(self.by_text.tokens, self.by_text.kinds, fresh, strict=False):
            right, count = self._known[kind]
            self._known[kind] = right, count = _DECAY * right + (guessed == token), _DECAY * count + 1
            self._chances[kind] = right / count
            if guessed != token:
                break
        self._short_chance = max([self._chances[kind] for kind in _SHORT])
        if drafted is not None:
            assert self._model is not None, "a rank drafts by model where it is asked to"
            for guessed, kind, token in zip(drafted.token_ids, self.by_model.kinds, fresh, strict=False):
                if kind == MODEL:
                    self._model.learn(guessed == token)


def _class_of(size: int) -> int:
    return min(size.bit_length(), len(_BY_AGREEMENT) - 1)


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
