"""Generation: the neutral request behind every dialect; Answer: the sum of its deltas.

A dialect parses its body into a Generation; the service (service.py) runs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvloom.contract.images import Sight
from kvloom.contract.request import Delta, FinishReason, KvGiven, KvLocation, TokenLogprob
from kvloom.contract.sampling import SamplingParams
from kvloom.server.serving.beams import Beams

MAX_CHOICES = 1024  # most answers of one HTTP request
MAX_EMBEDDINGS = 2048  # OpenAI's limit


class Tail(NamedTuple):
    """What follows the only prompt of a Generation in one of its choices; its last `num_scored` tokens are scored."""

    ids: tuple[int, ...]
    num_scored: int


@dataclass(frozen=True, slots=True)
class Generation:
    """Choices 0 .. len(prompts) * n - 1, prompt by prompt. best_of answers are generated for a prompt, and the n best
    returned. With `tails` there is one prompt and each choice is one of its tails, of which nothing is generated.

    With a `pooling` each choice is its prompt's embedding, as in engine.request.Request. `id` is the caller's; several
    generations may run under one id, and are stopped together.
    """

    id: str
    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    n: int = 1
    best_of: int = 1
    priority: int = 0  # as in engine.request.Request
    tenant: str = ""
    pooling: str = ""
    cache_salt: str = ""
    beams: Beams | None = None  # beam search: the n best answers, best first, each in one delta
    gives_kv: bool = False  # these three as in engine.request.Request
    kv_location: KvLocation | None = None
    sight: Sight | None = None
    seconds: tuple[int, ...] = ()  # engine.request.Request's `second` of each prompt; () = 0
    tails: tuple[Tail, ...] = ()
    prediction: tuple[int, ...] = ()  # as in engine.request.Request

    @property
    def is_look(self) -> bool:
        """Always False: a look at images asks the engine about a prompt and is no Generation, see
        engine.request.Request.
        """
        return False

    @property
    def num_choices(self) -> int:
        """Answers that are generated, or tails that are scored."""
        return len(self.tails) or len(self.prompts) * self.best_of

    @property
    def num_prompt_tokens(self) -> int:
        """Of the prompts, and of their tails."""
        return sum(map(len, self.prompts)) + sum(len(tail.ids) for tail in self.tails)

    @property
    def num_request_tokens(self) -> int:
        """Of the prompts of all its requests to the engine, which share the prompts of this one."""
        return self.num_prompt_tokens + sum(map(len, self.prompts)) * (max(len(self.tails), 1) * self.best_of - 1)

    def prompt_of(self, choice: int) -> tuple[int, ...]:
        if self.tails:
            return self.prompts[0] + self.tails[choice].ids
        return self.prompts[choice // self.best_of]


@dataclass(slots=True)
class Answer:
    """One choice, folded from its deltas."""

    prompt_ids: tuple[int, ...]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_texts: list[str] = field(default_factory=list)  # text that each token added
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    seed: int | None = None
    embedding: bytes | None = None  # these two as in engine.request.Delta
    kv_given: KvGiven | None = None

    def add(self, delta: Delta) -> None:
        if delta.token_ids:
            self.token_texts += [delta.text] + [""] * (len(delta.token_ids) - 1)
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.num_cached_tokens, self.seed = delta.num_cached_tokens, delta.seed
        self.embedding, self.kv_given = delta.embedding, delta.kv_given

    @property
    def mean_logprob(self) -> float:
        return sum(value.logprob for value in self.logprobs) / max(1, len(self.logprobs))


_NUMBER_BYTES = 4  # of an embedding


def num_items(delta: Delta) -> int:
    """Tokens, log-probabilities and numbers that a dialect may have to format for it."""
    count = len(delta.token_ids)
    if delta.embedding:
        count += len(delta.embedding) // _NUMBER_BYTES
    if delta.logprobs or delta.prompt_logprobs:
        known = [value for value in (*delta.logprobs, *(delta.prompt_logprobs or ())) if value is not None]
        count += len(known) + sum(len(value.top) for value in known)
    return count


def empty_answers(generation: Generation) -> list[Answer]:
    """One for each choice."""
    return [Answer(generation.prompt_of(choice)) for choice in range(generation.num_choices)]


def best_choices(generation: Generation, answers: Sequence[Answer]) -> list[int]:
    """For each prompt the n choices of highest mean log-probability, best first; all choices in order if there are no
    more.
    """
    if generation.best_of == generation.n:
        return list(range(len(answers)))
    found: list[int] = []
    for first in range(0, len(answers), generation.best_of):
        group = range(first, first + generation.best_of)
        found += sorted(group, key=lambda choice: -answers[choice].mean_logprob)[: generation.n]
    return found
