"""Recent texts: finished sequences as a source of guesses for later ones of the same scope. Pure.

Agents send the same file again and again, and an answer is often made twice. A finished sequence leaves its tokens and
the index that its own guesses were found with; only one that was never guessed is indexed when it is searched. Texts
are kept apart by scope, and what a request is guessed, and so how fast it is, never depends on a text of another scope.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from kvloom.engine.schedule.lookup import NOTHING, Grams, Match, PromptLookup

MOST_BYTES = 32 << 20  # of all texts, as counted below
MOST_TEXTS = 16  # of a scope: each is searched in each step
_TOKEN_BYTES = 64  # of a token in a list and its position in an index
_ENTRY_BYTES = 96  # of an n-gram's hash in a dictionary


class _Text(NamedTuple):
    token_ids: Sequence[int]
    grams: Sequence[Grams]  # the longest first
    num_long: int  # of them, as PromptLookup has

    @property
    def num_bytes(self) -> int:
        count = len(self.token_ids)
        return _TOKEN_BYTES * count + _ENTRY_BYTES * sum(grams.num_entries(count) for grams in self.grams)


class Recent:
    """The last texts of each scope. Owned by the engine's thread."""

    def __init__(self, max_bytes: int = MOST_BYTES) -> None:
        self._max_bytes = max_bytes
        self._texts: OrderedDict[int, tuple[Hashable, _Text]] = OrderedDict()  # by number, oldest first
        self._of_scope: dict[Hashable, list[int]] = {}  # numbers of its texts, oldest first
        self._new: dict[int, _Text] = {}  # those whose index may lack tokens
        self._last = 0
        self.num_bytes = 0

    def keep(self, scope: Hashable, token_ids: Sequence[int], lookup: PromptLookup) -> None:
        """A sequence has ended, whose `lookup` knows of `token_ids` what it was asked for; neither changes any more. A
        text that it begins with, an earlier turn of a conversation, is replaced.
        """
        text = _Text(token_ids, lookup.grams, lookup.num_long)
        for number in list(self._of_scope.get(scope, ())):
            old = self._texts[number][1].token_ids
            if token_ids[: len(old)] == old:
                self._drop(number)
        self._last += 1
        self._texts[self._last], self._new[self._last] = (scope, text), text
        self._of_scope.setdefault(scope, []).append(self._last)
        self.num_bytes += text.num_bytes
        if len(self._of_scope[scope]) > MOST_TEXTS:
            self._drop(self._of_scope[scope][0])
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._texts)))

    def find(
        self,
        scope: Hashable,
        token_ids: Sequence[int],
        most: int,
        forced: Sequence[int] = (),
        only_long: bool = False,
    ) -> Match:
        """At most `most` tokens that followed the end of `token_ids` and `forced` in a text of the scope: where most
        tokens agree, and of equal ones in the latest text. `only_long`: as of PromptLookup.propose.
        """
        numbers = self._of_scope.get(scope)
        if not numbers or most <= 0:
            return NOTHING
        while self._new:
            _, text = self._new.popitem()
            for grams in text.grams:
                grams.enter(text.token_ids)
        texts = [self._texts[number][1] for number in reversed(numbers)]
        first = texts[0]  # all texts have indices of the same sizes
        wanted = range(first.num_long if only_long else len(first.grams))
        last = [*token_ids[-first.grams[0].size :], *forced]
        keys = [first.grams[i].key(last) for i in wanted]
        if not keys or not (knowing := [text for text in texts if keys[-1] in text.grams[wanted[-1]].ends]):
            return NOTHING  # where a short n-gram is new, the longer ones are new as well
        return next(
            Match(text.token_ids[end : end + most], first.grams[i].size)
            for i in wanted
            for text in knowing
            if (end := text.grams[i].ends.get(keys[i])) is not None
        )

    def forget(self) -> None:
        """Forget all texts."""
        self._texts.clear()
        self._of_scope.clear()
        self._new.clear()
        self.num_bytes = 0

    def _drop(self, number: int) -> None:
        scope, text = self._texts.pop(number)
        self._new.pop(number, None)
        self.num_bytes -= text.num_bytes
        numbers = self._of_scope[scope]
        numbers.remove(number)
        if not numbers:
            del self._of_scope[scope]
