"""Guides: which tokens a grammar allows next. The parser is llguidance; this module serves it to a rank.

A guide computes the mask for the next token on a thread of its own, while the rank waits for the next step and during
that step. The vocabulary and each grammar are read there too. Other sequences do not wait for it: a sequence whose mask
is late gets no token in this step, and asks again in the next.

Of texts that a grammar forces (names of fields, punctuation) a guide also tells the tokens: the engine drafts them.
"""

import importlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kvloom.contract.sampling import SamplingParams
from kvloom.contract.tokenizer import Tokenizer
from kvloom.rank.grammar.reasoning import EndMark, Guide, Mask, ReasoningGuide

if TYPE_CHECKING:
    import llguidance

    # a parsed grammar, the tokens that end an answer, and the number of the model's tokens
    Reading = tuple[llguidance.LLMatcher, list[int], int]

_STUCK = "the answer's grammar cannot be followed any further"
_STEP_S = 0.01  # seconds that a step waits for masks
_SOON_S = 0.003  # seconds for which the rank's thread may look for forced tokens; that takes no longer than a mask
_STEP_FUEL = 1_000_000  # of llguidance's lexer for a token, 0.1 s: a patch in CDATA takes 300,000, its default less


class Patience:
    """How long the sequences of one step may wait for their masks, all together."""

    def __init__(self, step_s: float | None) -> None:
        """`step_s`: seconds a step; None = wait until the masks are there."""
        self._step_s = self._left_s = step_s

    def renew(self) -> None:
        """A step has ended: the next one has its full time."""
        self._left_s = self._step_s

    def wait(self, coming: Future[Any]) -> bool:
        """Wait for `coming` while time is left. Returns whether it is done."""
        if self._left_s is None or coming.done():
            return True  # without a limit, the caller of mask() waits there
        started_s = time.monotonic()
        wait([coming], self._left_s)
        self._left_s = max(0.0, self._left_s - (time.monotonic() - started_s))
        return coming.done()


class Guides:
    """Makes the guides of one model. The first one loads the tokenizer (40 MB) in the background."""

    def __init__(self, open_tokenizer: Callable[[], Tokenizer], num_logits: int, must_wait: bool = False) -> None:
        """`num_logits`: of the model's head; ids beyond the tokenizer's are never allowed.

        `must_wait`: never skip a late mask: several ranks must choose the same tokens in the same step.
        """
        self._patience = Patience(None if must_wait else _STEP_S)
        self._open_tokenizer, self._num_logits = open_tokenizer, num_logits
        self._spelling: Tokenizer | None = None
        self._lock = threading.Lock()  # guards _spelling
        self._tokenizer: llguidance.LLTokenizer | None = None  # used by the pool's thread only
        self._marks: dict[str, EndMark] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="guide")
        self._due: set[GrammarGuide] = set()  # guides whose next mask was not started yet

    def prepare_next(self) -> None:
        """Called while the rank waits for its next step: start computing the masks that it will need."""
        self._patience.renew()
        for guide in self._due:
            guide.begin()
        self._due.clear()

    def guide(self, params: SamplingParams) -> Guide | None:
        """The guide of a request whose grammar was checked (server/chat/grammars.py). None = every token is allowed
        always.
        """
        grammar = self._grammar(params.grammar) if params.grammar else None
        if not params.reasoning_end:
            return grammar
        return ReasoningGuide(self._mark(params.reasoning_end), grammar, params.max_reasoning_tokens)

    def _grammar(self, grammar: str) -> "GrammarGuide":
        def match() -> "Reading":
            tokenizer = self._open()
            limits = _llguidance().LLParserLimits(step_lexer_fuel=_STEP_FUEL)
            matcher = _llguidance().LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
            num_tokens = min(self._spell().vocab_size, self._num_logits)
            return matcher, [id for id in tokenizer.eos_tokens if id < num_tokens], num_tokens

        return GrammarGuide(match, self._num_logits, self._pool, self._due, self._patience)

    def _open(self) -> "llguidance.LLTokenizer":
        if self._tokenizer is None:
            self._tokenizer = _ll_tokenizer(self._spell())
        return self._tokenizer

    def _mark(self, text: str) -> EndMark:
        if text not in self._marks:
            spelling = self._spell()
            tokens = [spelling.token_bytes(i) for i in range(min(spelling.vocab_size, self._num_logits))]
            ids = spelling.encode_inside(text, is_plain=False)
            ends = [id for id in sorted(spelling.eos_ids) if id < len(tokens)]
            self._marks[text] = EndMark(text, ids, tokens, ends, self._num_logits)
        return self._marks[text]

    def _spell(self) -> Tokenizer:
        with self._lock:
            if self._spelling is None:
                self._spelling = self._open_tokenizer()
            return self._spelling


class GrammarGuide:
    """The position of one sequence in its grammar."""

    def __init__(
        self,
        match: "Callable[[], Reading]",
        num_logits: int,
        pool: ThreadPoolExecutor,
        due: "set[GrammarGuide]",
        patience: Patience,
    ) -> None:
        """`match` parses the grammar, on the pool's thread."""
        self._num_logits, self._pool, self._due, self._patience = num_logits, pool, due, patience
        self._matcher: llguidance.LLMatcher
        self._eos_ids: list[int]
        self._num_tokens: int
        self._problem = ""  # the parser's error, once it has given up
        self._taken: deque[int] = deque()  # chosen tokens that the matcher has not read yet
        self._forced: deque[int] = deque()  # tokens that must follow, if that is known
        self._mask_s = 0.0  # processor time of the last mask
        self._next: Future[Mask] | None = pool.submit(self._begin, match)
        self._last = self._next  # once it is done, the matcher is the rank's until another begins

    def begin(self) -> Future[Mask]:
        """Start computing the next mask, unless that was started."""
        if self._next is None:
            self._next = self._last = self._pool.submit(self._compute)
        return self._next

    def mask(self) -> Mask:
        """[num_logits] bool. The end of the answer is allowed when nothing else is."""
        return self.begin().result()

    def problem(self) -> str:
        """Why no token can follow: the parser has limits, and a valid grammar may still be too ambiguous for it. "" =
        none.
        """
        self.begin().result()
        return self._problem

    def is_ready(self) -> bool:
        return self._patience.wait(self.begin())

    def take(self, token_id: int) -> None:
        """The token was chosen. Does not wait: the pool's thread reads it before it computes the next mask."""
        self._taken.append(token_id)
        self._next = None
        self._due.add(self)
        if self._forced and self._forced.popleft() != token_id:
            self._forced.clear()

    def forced(self) -> Sequence[int]:
        if not self._forced and self._last.done() and self._mask_s < _SOON_S and self._read_taken():
            found = self._matcher.compute_ff_tokens()
            self._forced.extend(found if max(found, default=0) < self._num_tokens else ())
        return self._forced

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
        self._due.discard(self)

    def is_free(self, num_more: int) -> bool:
        return False

    def _begin(self, match: "Callable[[], Reading]") -> Mask:
        self._matcher, self._eos_ids, self._num_tokens = match()
        return self._compute()

    def _read_taken(self) -> bool:
        """Whether the grammar goes on behind the chosen tokens."""
        while self._taken:
            token_id = self._taken.popleft()
            if token_id not in self._eos_ids:
                self._matcher.consume_token(token_id)
        return not self._matcher.is_error() and not self._matcher.is_stopped()

    def _compute(self) -> Mask:
        started_s = time.thread_time()
        mask = np.zeros(self._num_logits, np.bool_)
        if self._read_taken():
            packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            bits = np.unpackbits(packed, bitorder="little", count=self._num_logits)  # missing bytes are zeros
            mask = bits.view(np.bool_)
            mask[self._num_tokens :] = False
            if not mask.any():
                self._problem = f"{_STUCK}: no token of the model spells what must come next"
        if self._matcher.is_error():
            told = self._matcher.get_error().partition("<state>")[0]  # the answer's tokens come behind it
            self._problem = f"{_STUCK}: {' '.join(told.split())}"
        if not mask.any():
            mask[list(self._eos_ids)] = True
            if not self._eos_ids and not self._problem:
                self._problem = f"{_STUCK}: the model has no token that ends an answer"
        self._mask_s = time.thread_time() - started_s
        return mask


class _Wrapped:
    """A tokenizer with the interface that llguidance expects. It spells every byte, and has an end: what the model has
    no token for gets one behind the model's, which no mask allows.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        ids = range(tokenizer.vocab_size)
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(i) for i in ids]
        self.special_token_ids = [i for i in ids if tokenizer.is_special(i)]
        plain = set(self.tokens).difference(self.tokens[i] for i in self.special_token_ids)
        self.tokens += [byte for byte in map(bytes, zip(range(256))) if byte not in plain]
        self.ends = sorted(tokenizer.eos_ids) or [len(self.tokens)]
        if not tokenizer.eos_ids:
            self.special_token_ids.append(len(self.tokens))
            self.tokens.append(b"<end>")
        self.eos_token_id = self.ends[0]

    def __call__(self, text: str) -> list[int]:
        """Ids of a piece of an answer: their bytes are the text's, which a tokenizer that changes texts (normalises
        them, reads U+2581 as a space) does not give.
        """
        if not isinstance(text, str):
            raise TypeError("this tokenizer takes text")
        ids, data = self._tokenizer.encode_inside(text), text.encode()
        return ids if b"".join(self.tokens[i] for i in ids) == data else list(self._longest(data))

    def _longest(self, data: bytes) -> Iterator[int]:
        """The ids of `data`, of all tokens that it may begin with the longest one each time."""
        at = 0
        while at < len(data):
            ends = range(min(len(data), at + self._most_bytes), at, -1)
            end = next(end for end in ends if data[at:end] in self._ids)
            yield self._ids[data[at:end]]
            at = end

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {token: i for i, token in enumerate(self.tokens) if token and i not in special}

    @cached_property
    def _most_bytes(self) -> int:
        return max(map(len, self._ids))


def _ll_tokenizer(tokenizer: Tokenizer) -> "llguidance.LLTokenizer":
    wrapped = _Wrapped(tokenizer)
    made: llguidance.LLTokenizer = _llguidance().LLTokenizer(
        _llguidance().TokenizerWrapper(wrapped), eos_token=wrapped.ends
    )
    return made


def _llguidance() -> Any:
    """The parser's library, imported only for grammars."""
    return importlib.import_module("llguidance")
