"""Live: a request in the engine, its sequence and the text side of its answer."""

from dataclasses import dataclass, field

from kvloom.contract.messages import Logprob, PromptLogprobs, Sample
from kvloom.contract.request import Delta, FinishReason, Request, TokenLogprob
from kvloom.engine.schedule.commit import forget_rank
from kvloom.engine.schedule.lookup import PromptLookup
from kvloom.engine.schedule.seq import Seq, Status
from kvloom.engine.text.detok import Detokenizer
from kvloom.engine.text.stop import StopStrings


@dataclass(slots=True, eq=False)
class Live:
    """Owned by the engine's thread, from `Engine.add` to the delta that ends the request."""

    request: Request
    seq: Seq
    seed: int
    detok: Detokenizer
    stops: StopStrings
    arrival_s: float
    lookup: PromptLookup | None  # what guesses its next tokens; None = nobody does
    is_known: bool = False  # the rank has its tokens
    num_lost: int | None = None  # tokens that were computed when a rank died under it, until it runs again
    finish: FinishReason | None = None  # why its last token is the last; stop strings are found later
    prompt_logprobs: list[TokenLogprob | None] | None = field(default_factory=list)  # so far; None = they were told
    embedding: bytes | None = None

    def go_on(self) -> None:
        """Behind the answer that the request brings: its text was told, but for what is held back."""
        for token_id in self.request.answer:
            self.stops.add(self.detok.add(token_id))
            self.prompt_logprobs = None

    def lose_rank(self) -> None:
        """Whatever the rank knew of it is gone."""
        if self.seq.status is Status.RUNNING:
            self.num_lost = self.seq.num_computed
        self.is_known = False
        forget_rank(self.seq)

    def take_prompt_logprobs(self, chunk: PromptLogprobs) -> None:
        """One more chunk of the prompt is computed."""
        if self.prompt_logprobs is None:  # they were told; a preempted answer computes its prompt again
            return
        known = self.prompt_logprobs or [None]
        del known[chunk.start + 1 :]  # a prompt that was preempted half-way is computed again
        self.prompt_logprobs = known + [_logprob(value) for value in chunk.values]

    def text_of(self, fresh: "Fresh") -> str:
        """Text that the token releases, stop strings applied; at the end also what was held back."""
        text = ""
        is_stop_token = fresh.finish is FinishReason.STOP and not self.request.params.include_stop
        if fresh.token is not None and not is_stop_token:
            text = self.stops.add(self.detok.add(fresh.token.token_id))
        if fresh.finish is not None and self.stops.matched is None:
            text += self.stops.finish()
        return text

    def delta(
        self,
        finish: FinishReason | None,
        token: Sample | None = None,
        text: str = "",
        stop_reason: str | int | None = None,
    ) -> Delta:
        """What the request is told of this step. The first one takes the prompt's log-probabilities along."""
        logprob = token.logprob if token else None
        prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return Delta(
            request_id=self.request.id,
            text=text,
            token_ids=() if token is None else (token.token_id,),
            logprobs=() if logprob is None else (_logprob(logprob),),
            prompt_logprobs=tuple(prompt_logprobs) if prompt_logprobs else None,
            finish_reason=finish,
            stop_reason=stop_reason,
            num_cached_tokens=self.seq.num_cached,
            seed=None if self.request.params.is_greedy else self.seed,
            embedding=self.embedding,
        )


@dataclass(frozen=True, slots=True)
class Fresh:
    """A token sampled by the last step, not yet detokenised. None: the request ended without one."""

    live: Live
    token: Sample | None
    finish: FinishReason | None


def _logprob(value: Logprob) -> TokenLogprob:
    return TokenLogprob(value.token_id, value.logprob, tuple((token, logprob) for token, logprob in value.top))
