"""Recent texts: finished sequences as a source of guesses for later ones of the same scope. Pure.

Agents send the same file again and again, and an answer is often made twice. A finished sequence leaves its tokens and
the index that its own guesses were found with, so nothing is computed for it. Texts are kept apart by scope, and what a
request is guessed, and so how fast it is, never depends on a text of another scope.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from kvloom.engine.schedule.lookup import Match, PromptLookup

MOST_BYTES = 32 << 20  # of all texts, as counted below
MOST_TEXTS = 16  # of a scope: each is searched in each step
_TOKEN_BYTES = 64  # of a token in a list and its position in an index
_ENTRY_BYTES = 96  # of an n-gram's hash in a dictionary


class _Text(NamedTuple):
    token_ids: Sequence[int]
    lookup: PromptLookup

    @property
    def num_bytes(self) -> int:
        return _TOKEN_BYTES * len(self.token_ids) + _ENTRY_BYTES * self.lookup.num_entries


class Recent:
    """The last texts of each scope. Owned by the engine's thread."""

    def __init__(self, max_bytes: int = MOST_BYTES) -> None:
        self._max_bytes = max_bytes
        self._texts: OrderedDict[int, tuple[Hashable, _Text]] = OrderedDict()  # by number, oldest first
        self._of_scope: dict[Hashable, list[int]] = {}  # numbers of its texts, oldest first
        self._last = 0
        self.num_bytes = 0

    def keep(self, scope: Hashable, token_ids: Sequence[int], lookup: PromptLookup) -> None:
        """A sequence has ended, whose `lookup` knows all of `token_ids`; neither changes any more. A text that it
        begins with, an earlier turn of a conversation, is replaced.
        """
        text = _Text(token_ids, lookup)
        for number in list(self._of_scope.get(scope, ())):
            old = self._texts[number][1].token_ids
            if token_ids[: len(old)] == old:
                self._drop(number)
        self._last += 1
        self._texts[self._last] = scope, text
        self._of_scope.setdefault(scope, []).append(self._last)
        self.num_bytes += text.num_bytes
        if len(self._of_scope[scope]) > MOST_TEXTS:
            self._drop(self._of_scope[scope][0])
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._texts)))

    def find(self, scope: Hashable, last: Sequence[int], most: int) -> Match:
        """At most `most` tokens that followed the end of `last` in a text of the scope: where most tokens agree, and of
        equal ones in the latest text.
        """
        numbers = self._of_scope.get(scope, ())
        if not numbers or most <= 0:
            return Match()
        texts = [self._texts[number][1] for number in reversed(numbers)]
        keys = texts[0].lookup.keys(last)  # all texts have indices of the same sizes
        found = (text.lookup.match(keys, text.token_ids, most) for text in texts)
        return max(found, key=lambda match: match.size)

    def forget(self) -> None:
        """Forget all texts."""
        self._texts.clear()
        self._of_scope.clear()
        self.num_bytes = 0

    def _drop(self, number: int) -> None:
        scope, text = self._texts.pop(number)
        self.num_bytes -= text.num_bytes
        numbers = self._of_scope[scope]
        numbers.remove(number)
        if not numbers:
            del self._of_scope[scope]
