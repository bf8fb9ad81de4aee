"""Guides: which tokens a grammar allows next. The parser is llguidance; here is its place in a rank.

A guide's mask for the next token is computed on a thread of its own, beside the rank's wait for the next step and the
step itself. The vocabulary and each grammar are read there too, so that other sequences do not wait for them.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import llguidance
import numpy as np

from kvloom.engine.reasoning_guide import EndMark, Guide, Mask, ReasoningGuide
from kvloom.engine.request import SamplingParams

log = logging.getLogger(__name__)


class Spelling(Protocol):
    """What guides need of a tokenizer."""

    @property
    def eos_ids(self) -> Any: ...
    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...


class Guides:
    """Makes the guides of one model. The tokenizer is opened beside the steps."""

    def __init__(self, open_tokenizer: Callable[[], Spelling], num_logits: int) -> None:
        """`num_logits`: of the model's head; those beyond the tokenizer's tokens are never allowed."""
        self._open_tokenizer, self._num_logits = open_tokenizer, num_logits
        self._spelling: Spelling | None = None
        self._lock = threading.Lock()  # of _spelling
        self._tokenizer: llguidance.LLTokenizer | None = None  # of the pool's thread
        self._marks: dict[str, EndMark] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="guide")
        self._is_opening = False
        self._due: list[GrammarGuide] = []  # those whose mask for the next step has not been begun

    def rest(self) -> None:
        """The rank waits for its next step: begin what that will need, in the background.

        Also the tokenizer, so that the first guide need not open it; when that fails, it says why.
        """
        if not self._is_opening:
            self._is_opening = True
            self._pool.submit(self._open)
        for guide in self._due:
            guide.begin()
        self._due.clear()

    def guide(self, params: SamplingParams) -> Guide | None:
        """Of a request whose grammar has been checked (server/grammars.py). None = every token may always come."""
        grammar = self._grammar(params.grammar) if params.grammar else None
        if not params.reasoning_end:
            return grammar
        return ReasoningGuide(self._mark(params.reasoning_end), grammar, params.max_reasoning_tokens)

    def _grammar(self, grammar: str) -> "GrammarGuide":
        def match() -> tuple[llguidance.LLMatcher, list[int]]:
            tokenizer = self._open()
            return llguidance.LLMatcher(tokenizer, grammar, log_level=0), list(tokenizer.eos_tokens)

        return GrammarGuide(match, self._num_logits, self._pool, self._due)

    def _open(self) -> llguidance.LLTokenizer:
        if self._tokenizer is None:
            self._tokenizer = _ll_tokenizer(self._spell())
        return self._tokenizer

    def _mark(self, text: str) -> EndMark:
        if text not in self._marks:
            spelling = self._spell()
            tokens = [spelling.token_bytes(i) for i in range(min(spelling.vocab_size, self._num_logits))]
            ids = spelling.encode(text, add_special_tokens=False)
            self._marks[text] = EndMark(text, ids, tokens, sorted(spelling.eos_ids), self._num_logits)
        return self._marks[text]

    def _spell(self) -> Spelling:
        with self._lock:
            if self._spelling is None:
                self._spelling = self._open_tokenizer()
            return self._spelling


class GrammarGuide:
    """One sequence's place in its grammar."""

    def __init__(
        self,
        match: Callable[[], tuple[llguidance.LLMatcher, list[int]]],
        num_logits: int,
        pool: ThreadPoolExecutor,
        due: "list[GrammarGuide]",
    ) -> None:
        """`match` reads the grammar, on the pool's thread; with it the tokens that end an answer."""
        self._num_logits, self._pool, self._due = num_logits, pool, due
        self._matcher: llguidance.LLMatcher
        self._eos_ids: list[int]
        self._next: Future[Mask] | None = pool.submit(self._begin, match)

    def begin(self) -> Future[Mask]:
        """Compute what may follow, unless that has begun."""
        if self._next is None:
            self._next = self._pool.submit(self._compute)
        return self._next

    def mask(self) -> Mask:
        """The end of the answer is allowed when nothing else is."""
        return self.begin().result()

    def take(self, token_id: int) -> None:
        """The token was chosen."""
        if self._next is not None:
            self._next.result()
        self._next = None
        self._due.append(self)
        if token_id not in self._eos_ids and not self._matcher.consume_token(token_id):
            log.warning("a grammar gave up: %s", self._matcher.get_error())

    def is_free(self, num_more: int) -> bool:
        return False

    def _begin(self, match: Callable[[], tuple[llguidance.LLMatcher, list[int]]]) -> Mask:
        self._matcher, self._eos_ids = match()
        return self._compute()

    def _compute(self) -> Mask:
        mask = np.zeros(self._num_logits, np.bool_)
        if not self._matcher.is_error() and not self._matcher.is_stopped():
            packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            bits = np.unpackbits(packed, bitorder="little", count=self._num_logits)  # those missing are zeros
            mask = bits.view(np.bool_)
        if not mask.any():
            mask[list(self._eos_ids)] = True
        return mask


class _Wrapped:
    """A tokenizer in the form that llguidance asks for."""

    def __init__(self, tokenizer: Spelling) -> None:
        self._tokenizer = tokenizer
        ids = range(tokenizer.vocab_size)
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(i) for i in ids]
        self.special_token_ids = [i for i in ids if tokenizer.is_special(i)]

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("this tokenizer takes text")
        return self._tokenizer.encode(text, add_special_tokens=False)


def _ll_tokenizer(tokenizer: Spelling) -> llguidance.LLTokenizer:
    wrapped = llguidance.TokenizerWrapper(_Wrapped(tokenizer))
    return llguidance.LLTokenizer(wrapped, eos_token=sorted(tokenizer.eos_ids))
