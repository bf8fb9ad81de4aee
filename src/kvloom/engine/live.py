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
from kvloom.engine.schedule.blocks import BASE, LastChain, Scope
from kvloom.engine.schedule.commit import forget_rank
from kvloom.engine.schedule.guessing import Guesser
from kvloom.engine.schedule.seq import Seq, SeqStep, Status
from kvloom.engine.text.detok import Detokenizer, text_bytes
from kvloom.engine.text.stop import Ends, StopStrings, finish_of


@dataclass(slots=True, eq=False)
class Live:
    """The state of a request, from `Engine.add` to the delta that ends it. Owned by the engine's thread."""

    request: Request
    seq: Seq
    seed: int
    told_seed: int | None  # the seed reported to the caller; None when greedy
    detok: Detokenizer
    stops: StopStrings
    arrival_s: float
    guesser: Guesser | None = None  # of its next tokens; None = no speculation
    num_guessed: tuple[int, int] = (0, 0)  # drafted tokens that were right, and wrong
    is_known: bool = False  # the rank has its NewSeq
    num_lost: int | None = None  # tokens that were computed when a rank died, until it runs again
    finish: FinishReason | None = None  # why the last token ends the answer; stop strings are found only later
    prompt_logprobs: list[TokenLogprob | None] | None = field(default_factory=list)  # so far; None = delivered
    embedding: bytes | None = None
    following: Logprob | None = None  # of what would follow the prompt, where nothing is generated

    def go_on(self) -> None:
        """Continue after the answer that the request carries: its text was delivered, except what a stop string holds
        back.
        """
        for token_id in self.request.answer:
            self.stops.add(self.detok.add(token_id))
            self.prompt_logprobs = None

    def introduce(self) -> NewSeq:
        """The NewSeq that introduces it to the rank, which knows it from then on."""
        self.is_known = True
        request, seq = self.request, self.seq
        known = seq.token_ids[: seq.num_prompt], seq.token_ids[seq.num_prompt :]
        about = request.pooling, request.adapter
        begin = seq.switch.at if seq.switch is not None else 0
        is_guessed = self.guesser is not None
        return NewSeq(seq.id, known[0], request.params, self.seed, *about, known[1], request.second, begin, is_guessed)

    def count_start(self, counts: Counts, step: SeqStep) -> None:
        """Count its start, or its continuation after a crash, with its first step."""
        counts.add("total_snapshot_hits", step.snapshot is not None)
        counts.add("total_block_hits", len(step.hits) + (step.part >= 0))
        counts.add("total_window_hits", len(step.windows) + (step.part_window >= 0))
        counts.add("total_stateless_tokens" if self.seq.states else "total_windowless_tokens", step.num_unusable)
        if self.seq.num_preemptions == 0:
            counts.add("total_cached_tokens", self.seq.num_cached)
        if self.num_lost is not None:
            counts.add("total_resumed")
            counts.add("total_recomputed_tokens", max(0, self.num_lost - step.start))
            self.num_lost = None

    def lose_rank(self) -> None:
        """The rank is gone, with everything that it knew of this request."""
        if self.seq.status is Status.RUNNING:
            self.num_lost = self.seq.num_computed
        self.is_known = False
        forget_rank(self.seq)

    def take_prompt_logprobs(self, chunk: PromptLogprobs) -> None:
        """Take the log-probabilities of one more chunk of the prompt."""
        if self.prompt_logprobs is None:  # already delivered: a preempted sequence computes its prompt again
            return
        first = self.request.params.scored_from
        known = self.prompt_logprobs or ([] if first else [None])
        del known[chunk.start + 1 - first :]  # a prompt that was preempted half-way starts again
        self.prompt_logprobs = known + [_logprob(value) for value in chunk.values]

    def take(self, samples: Sequence[Sample], ends: Ends) -> list["Fresh"]:
        """The sampled tokens that belong to the answer, each with its finish reason; later ones are dropped."""
        seq, params = self.seq, self.request.params
        if params.max_tokens == 0:  # only the prompt's log-probabilities or states were asked for
            self.finish = FinishReason.LENGTH
            self.following = samples[-1].logprob if samples and params.logprob_ids else None
            return [Fresh(self, None, self.finish)]
        taken: list[Fresh] = []
        for sample in samples:
            num_output = len(seq.token_ids) + len(taken) + 1 - seq.num_prompt
            self.finish = finish_of(sample.token_id, seq.num_prompt, num_output, params, ends)
            taken.append(Fresh(self, sample, self.finish))
            if self.finish is not None:
                break
        return taken

    def judge(self, num_drafted: int, num_right: int) -> tuple[int, int]:
        """A step had so many drafted tokens, of which the first ones were right. Returns both numbers."""
        right, wrong = self.num_guessed
        self.num_guessed = right + num_right, wrong + num_drafted - num_right
        return num_drafted, num_right

    def tell(self, fresh: "Fresh") -> Delta:
        """The delta of a token. Ends the answer when the token completes a stop string."""
        _, token, finish = fresh
        text, stop_reason = self.text_of(fresh), None
        if self.stops.matched is not None:
            return self.delta(FinishReason.STOP, token, text, self.stops.matched)
        if finish is FinishReason.STOP and token is not None:
            stop_reason = token.token_id
        return self.delta(finish, token, text, stop_reason)

    def text_of(self, fresh: "Fresh") -> str:
        """Text that the token completes, stop strings applied; at the end also the text that was held back.

        A token that ends the answer is a mark, and text only with include_stop.
        """
        text = ""
        _, token, finish = fresh
        is_mark = finish in (FinishReason.EOS, FinishReason.STOP) and not self.request.params.include_stop
        if token is not None and not is_mark:
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
        """The request's delta of this step. The first one carries the prompt's log-probabilities."""
        logprob = token.logprob if token else self.following
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
            num_guessed=self.num_guessed if finish is not None else (0, 0),
        )


class Fresh(NamedTuple):
    """A token of the last step, not detokenised yet. None: the request ended without a token."""

    live: Live
    token: Sample | None
    finish: FinishReason | None


class Arrivals:
    """Makes the Live of each accepted request: numbers it, hashes it, and draws a seed where none was given."""

    def __init__(self, config: EngineConfig, vocabulary: Tokenizer) -> None:
        self._config, self._vocabulary = config, vocabulary
        self._next_id, self._last = 0, LastChain()

    def live(self, request: Request, max_seq_len: int, scope: Scope = BASE, now_s: float = 0.0) -> Live:
        request = capped(request, self._config.max_iter_times)
        params, config = request.params, self._config
        seq = Seq(self._next_id, [*request.prompt_ids, *request.answer], len(request.prompt_ids), *scope)
        seq.max_len = request.max_len(max_seq_len)
        seq.scored_from = None if params.prompt_logprobs is None else params.scored_from
        seed = params.seed
        if seed is None:
            seed = secrets.randbits(63) if config.seed is None else (config.seed + seq.id) & (2**63 - 1)
        detok = Detokenizer(text_bytes(self._vocabulary, params.skip_special_tokens))
        told_seed = None if params.is_greedy else seed
        stops = StopStrings(params.stop, params.include_stop, params.min_tokens)
        live = Live(request, seq, seed, told_seed, detok, stops, now_s)
        live.go_on()
        self._next_id += 1
        return live

    def hash(self, live: Live, block_size: int) -> None:
        """Hash the blocks of its prompt."""
        request, seq = live.request, live.seq
        seq.hashes = self._last.of(request.prompt_ids + request.answer, block_size, Scope(seq.salt, seq.switch))
        seq.extend_hashes(block_size)


def oldest_wait_s(lives: Iterable[Live], now_s: float) -> float:
    """How long the oldest waiting request has waited."""
    return now_s - min((live.arrival_s for live in lives if live.seq.status is Status.WAITING), default=now_s)


def _logprob(value: Logprob) -> TokenLogprob:
    return TokenLogprob(value.token_id, value.logprob, tuple((token, logprob) for token, logprob in value.top))
