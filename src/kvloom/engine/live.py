"""Live: a request in the engine, its sequence and the text side of its answer; Arrivals makes them."""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvloom.contract.config import EngineConfig
from kvloom.contract.messages import Logprob, NewSeq, PromptLogprobs, Sample
from kvloom.contract.request import Delta, FinishReason, Request, TokenLogprob, capped
from kvloom.contract.tokenizer import Tokenizer
from kvloom.engine.counts import Counts
from kvloom.engine.schedule.commit import forget_rank
from kvloom.engine.schedule.lookup import PromptLookup
from kvloom.engine.schedule.seq import Seq, Status
from kvloom.engine.text.detok import Detokenizer, text_bytes
from kvloom.engine.text.stop import Ends, StopStrings, finish_of


@dataclass(slots=True, eq=False)
class Live:
    """Owned by the engine's thread, from `Engine.add` to the delta that ends the request."""

    request: Request
    seq: Seq
    seed: int
    told_seed: int | None  # what the caller is told of it: None when greedy
    detok: Detokenizer
    stops: StopStrings
    arrival_s: float
    lookup: PromptLookup | None = None  # what guesses its next tokens; None = nobody does
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

    def introduce(self) -> NewSeq:
        """What a rank must be told of it, which then knows it."""
        self.is_known = True
        request, seq = self.request, self.seq
        known = seq.token_ids[: seq.num_prompt], seq.token_ids[seq.num_prompt :]
        about = request.pooling, request.adapter
        return NewSeq(seq.id, known[0], request.params, self.seed, *about, known[1], request.second)

    def count_start(self, counts: Counts, num_cached: int) -> None:
        """It begins, or goes on after a crash; so many of its tokens need not be computed."""
        if self.seq.num_preemptions == 0:
            counts.add("total_cached_tokens", self.seq.num_cached)
        if self.num_lost is not None:
            counts.add("total_resumed")
            counts.add("total_recomputed_tokens", max(0, self.num_lost - num_cached))
            self.num_lost = None

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

    def take(self, samples: Sequence[Sample], ends: Ends) -> list["Fresh"]:
        """The sampled tokens that the answer has; those beyond its end are dropped."""
        seq, params = self.seq, self.request.params
        if params.max_tokens == 0:  # only the prompt's log-probabilities or its states were wanted
            self.finish = FinishReason.LENGTH
            return [Fresh(self, None, self.finish)]
        taken: list[Fresh] = []
        for sample in samples:
            num_output = len(seq.token_ids) + len(taken) + 1 - seq.num_prompt
            self.finish = finish_of(sample.token_id, seq.num_prompt, num_output, params, ends)
            taken.append(Fresh(self, sample, self.finish))
            if self.finish is not None:
                break
        return taken

    def tell(self, fresh: "Fresh") -> Delta:
        """What the token says to people. Ends the answer, too, when it completes a stop string."""
        _, token, finish = fresh
        text, stop_reason = self.text_of(fresh), None
        if self.stops.matched is not None:
            return self.delta(FinishReason.STOP, token, text, self.stops.matched)
        if finish is FinishReason.STOP and token is not None:
            stop_reason = token.token_id
        return self.delta(finish, token, text, stop_reason)

    def text_of(self, fresh: "Fresh") -> str:
        """Text that the token releases, stop strings applied; at the end also what was held back."""
        text = ""
        _, token, finish = fresh
        is_stop_token = finish is FinishReason.STOP and not self.request.params.include_stop
        if token is not None and not is_stop_token:
            text = self.stops.add(self.detok.add(token.token_id))
        if finish is not None and self.stops.matched is None:
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
            self.request.id,
            text,
            () if token is None else (token.token_id,),
            () if logprob is None else (_logprob(logprob),),
            tuple(prompt_logprobs) if prompt_logprobs else None,
            finish,
            stop_reason,
            self.seq.num_cached,
            self.told_seed,
            embedding=self.embedding,
        )


class Fresh(NamedTuple):
    """A token sampled by the last step, not yet detokenised. None: the request ended without one."""

    live: Live
    token: Sample | None
    finish: FinishReason | None


class Arrivals:
    """Makes a Live of each request that an engine has accepted: numbers them, and draws seeds for those without."""

    def __init__(self, config: EngineConfig, vocabulary: Tokenizer) -> None:
        self._config, self._vocabulary = config, vocabulary
        self._next_id = 0

    def live(self, request: Request, max_seq_len: int, salt: str = "", now_s: float = 0.0) -> Live:
        request = capped(request, self._config.max_iter_times)
        params, config = request.params, self._config
        seq = Seq(self._next_id, [*request.prompt_ids, *request.answer], len(request.prompt_ids), salt)
        seq.max_len = request.max_len(max_seq_len)
        seed = params.seed
        if seed is None:
            seed = secrets.randbits(63) if config.seed is None else (config.seed + seq.id) & (2**63 - 1)
        detok = Detokenizer(text_bytes(self._vocabulary, params.skip_special_tokens))
        told_seed = None if params.is_greedy else seed
        live = Live(request, seq, seed, told_seed, detok, StopStrings(params.stop, params.include_stop), now_s)
        live.go_on()
        self._next_id += 1
        return live


def oldest_wait_s(lives: Iterable[Live], now_s: float) -> float:
    """How long the oldest waiting request has waited."""
    return now_s - min((live.arrival_s for live in lives if live.seq.status is Status.WAITING), default=now_s)


def _logprob(value: Logprob) -> TokenLogprob:
    return TokenLogprob(value.token_id, value.logprob, tuple((token, logprob) for token, logprob in value.top))
