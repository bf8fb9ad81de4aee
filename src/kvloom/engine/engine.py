"""Engine: requests in, deltas out, one step at a time. No thread, no asyncio, no HTTP.

A step has two halves, so that work for people overlaps work for the model:

  start_step   plan -> hand the batch to the executor -> detokenise what the step before has sampled
  finish_step  wait for the executor -> append tokens, publish blocks, end sequences
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields

from kvloom.engine.adapters import Adapters
from kvloom.engine.batch import Batch, Logprob, NewSeq, PromptLogprobs, Sample
from kvloom.engine.blocks import BlockPool, adapter_salt, extend_chain
from kvloom.engine.config import EngineConfig, Limits
from kvloom.engine.detok import Detokenizer, Vocabulary, text_bytes
from kvloom.engine.errors import BadRequest
from kvloom.engine.executor import Executor
from kvloom.engine.lookup import PromptLookup
from kvloom.engine.policies import Turns, policy_of
from kvloom.engine.request import Delta, FinishReason, Request, TokenLogprob, capped, check_request
from kvloom.engine.scheduler import Plan, Seq, Status, apply_step, check, commit_step, plan_step, release_seq, swap_out
from kvloom.engine.stats import Stats
from kvloom.engine.stop import StopStrings, finish_of
from kvloom.engine.swap import ComputeTimer, SwapCosts
from kvloom.engine.transfers import Transfers

Planner = Callable[[Sequence[Seq], BlockPool, Limits], Plan]  # plan_step, or a policy on top of it


@dataclass(slots=True, eq=False)
class _Live:
    """A request in the engine: its sequence and the text side of its answer."""

    request: Request
    seq: Seq
    seed: int
    detok: Detokenizer
    stops: StopStrings
    arrival_s: float
    lookup: PromptLookup | None  # what guesses its next tokens; None = nobody does
    is_known: bool = False  # the rank has its tokens
    finish: FinishReason | None = None  # why its last token is the last; stop strings are found later
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    embedding: bytes | None = None


@dataclass(frozen=True, slots=True)
class _Fresh:
    """A token sampled by the last step, not yet detokenised. token None: the request ended without one."""

    live: _Live
    token_id: int | None
    logprob: Logprob | None
    finish: FinishReason | None


class Engine:
    """Owns the sequences and the block pool of one model. Call it from one thread.

    Requests wait in order of arrival; every added request gets exactly one delta with a finish_reason.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        vocabulary: Vocabulary,
        planner: Planner | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`planner` replaces plan_step under the policy of `config`."""
        self.config = config
        self._planner = planner or self._plan_by_policy
        self._clock = clock
        self._policy = policy_of(config.prefill_policy, config.decode_policy)
        self._turns = Turns(config.fair_token_s)
        self._executor = executor
        self._vocabulary = vocabulary
        self.adapters = Adapters(executor, lambda: (live.request.adapter for live in self._seqs.values()))
        self._seqs: dict[int, _Live] = {}  # arrival order
        self._by_request: dict[str, _Live] = {}
        self._next_id = 0
        self._fresh: list[_Fresh] = []
        self._outbox: list[Delta] = []  # deltas that no step produces: ends before the first step
        self._dropped: list[int] = []
        self._plan = Plan()
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._compute_s = 0.0
        self._timer = ComputeTimer()
        self.reset()

    def reset(self) -> None:
        """Start over with the executor as it is now (a new rank knows nothing). Live requests must have been failed."""
        info = self._executor.info
        self.max_seq_len = min(info.max_seq_len, self.config.max_seq_len or info.max_seq_len)
        self.max_seq_len = min(self.max_seq_len, info.num_blocks * info.block_size)
        self._limits = self.config.limits(info.block_size)
        self._pool = BlockPool(info.num_blocks, self.config.enable_prefix_cache, info.num_host_blocks)
        tier = self.config.kv_tier
        self._transfers = Transfers(self._pool, tier.timeout_s if tier else None)
        self._plan = Plan()
        self._dropped = []

    @property
    def has_work(self) -> bool:
        return bool(self._seqs or self._fresh or self._outbox or self._transfers.is_pending)

    @property
    def is_stalled(self) -> bool:
        """Whether the last step computed nothing and the next would not either before the outer tier has answered."""
        return not (self._plan.steps or self._outbox or self._plan.preempted) and self._transfers.is_pending

    def add(self, request: Request) -> None:
        """Accept a request. Raises BadRequest when it can never run, NotFound when its adapter is gone."""
        check_request(request, self.max_seq_len, self._executor.info.vocab_size)
        if request.id in self._by_request:
            raise BadRequest("request_id", f"{request.id!r} is in use by a running request")
        request = capped(request, self.config.max_iter_times)
        params = request.params
        seed = params.seed if params.seed is not None else self._draw_seed()
        salt = adapter_salt(request.cache_salt, self.adapters.digest(request.adapter))
        seq = Seq(self._next_id, list(request.prompt_ids), len(request.prompt_ids), salt)
        seq.priority = request.priority
        seq.max_len = self._max_len(request)
        now_s = self._clock()
        seq.turn = self._turns.turn(now_s, seq.max_len, request.tenant, request.priority, request.slo_s)
        seq.may_reuse = request.may_reuse
        extend_chain(seq.hashes, seq.token_ids, self._limits.block_size, seq.salt)
        stops = StopStrings(params.stop, params.include_stop)
        live = _Live(request, seq, seed, self._detokenizer(request), stops, now_s, self._lookup())
        self._next_id += 1
        self._counts["total_requests"] += 1
        self._counts["total_prompt_tokens"] += seq.num_prompt
        self._by_request[request.id] = live
        if request.computes_nothing:
            self._retire(live)
            self._outbox.append(self._delta(live, finish=FinishReason.LENGTH))
        else:
            self._seqs[seq.id] = live

    def abort(self, request_id: str) -> None:
        """End a request now; its blocks are free at once. Unknown and finished ids are ignored."""
        live = self._by_request.get(request_id)
        if live is not None:
            self._retire(live)
            self._fresh = [fresh for fresh in self._fresh if fresh.live is not live]
            self._outbox.append(self._delta(live, finish=FinishReason.ABORT))

    def fail_all(self, error: str) -> list[Delta]:
        """End every request with an error: the model, or this engine's own state, cannot be relied on any more.

        Touches neither sequences nor blocks; `reset` comes before the next request. Returns the last deltas.
        """
        deltas, self._outbox, self._fresh = self._outbox, [], []
        deltas += [self._delta(live, finish=FinishReason.ERROR, error=error) for live in self._by_request.values()]
        self._counts["total_finished"] += len(self._by_request)
        self._seqs.clear()
        self._by_request.clear()
        return deltas

    def step(self) -> list[Delta]:
        """Both halves: the deltas are those of the step before."""
        deltas = self.start_step()
        self.finish_step()
        return deltas

    def start_step(self) -> list[Delta]:
        """Start the next step on the model, then return what the last one brought. Raises RankDied."""
        now_s = self._clock()
        self._transfers.expire(now_s)
        self.adapters.sweep()
        self._plan = self._planner([live.seq for live in self._seqs.values()], self._pool, self._limits)
        if self._plan.steps or self._plan.loads or self._dropped or self._transfers.is_pending:
            copies = swap_out(self._plan, self._pool)
            work = apply_step(self._plan, self._pool)
            self._transfers.load(self._plan.loads, now_s)
            self._executor.submit(Batch(self._introduce(), work, self._dropped, copies, *self._transfers.take_new()))
            self._dropped = []
            self._counts["total_steps"] += bool(work)
            self._counts["total_preemptions"] += len(self._plan.preempted)
            self._counts["total_swapped"] += len(self._plan.swapped)
        return self._drain()

    def take_deltas(self) -> list[Delta]:
        """What the last step brought, now: for a caller whose executor leaves nothing to overlap."""
        return self._drain()

    def finish_step(self) -> None:
        """Wait for the step and take its tokens. Raises RankDied."""
        if not self._executor.is_busy:
            return
        output = self._executor.collect()
        self._compute_s += output.compute_s
        self._timer.learn(sum(step.num_tokens for step in self._plan.steps), output.compute_s)
        for chunk in output.prompt_logprobs:
            self._take_prompt_logprobs(chunk)
        self._transfers.finish(output.moved, output.is_tier_up)
        samples: dict[int, list[Sample]] = {}
        for sample in output.samples:
            samples.setdefault(sample.id, []).append(sample)
        for pooled in output.pooled:
            samples[pooled.id] = []
            if pooled.id in self._seqs:
                self._seqs[pooled.id].embedding = pooled.data
        steps = [s for s in self._plan.steps if s.seq.status is Status.RUNNING and s.seq.id in samples]
        taken = {step.seq.id: self._take_samples(self._seqs[step.seq.id], samples[step.seq.id]) for step in steps}
        self._transfers.save(commit_step(self._plan, taken, self._pool, self._limits.block_size))
        for step in steps:
            self._go_on(self._seqs[step.seq.id], len(step.draft), max(0, len(samples[step.seq.id]) - 1))

    def stats(self) -> Stats:
        num_running = sum(live.seq.status is Status.RUNNING for live in self._seqs.values())
        return Stats(
            num_running=num_running,
            num_waiting=len(self._seqs) - num_running,
            num_blocks=self._pool.num_blocks,
            num_free_blocks=self._pool.num_free,
            num_cached_blocks=self._pool.num_cached,
            num_swapped=sum(bool(live.seq.host_blocks) for live in self._seqs.values()),
            num_host_blocks=self._pool.host.num_blocks,
            num_free_host_blocks=self._pool.host.num_free,
            max_batch=self._limits.max_batch,
            total_compute_s=self._compute_s,
            **self._counts,
            **self._transfers.counts(),
        )

    def check(self) -> None:
        """Assert the invariants of sequences and blocks; cheap enough to run when idle."""
        seqs = [live.seq for live in self._seqs.values()]
        check(seqs, self._pool, self._limits.block_size, self._transfers.held())

    # -- requests

    def _max_len(self, request: Request) -> int:
        """Tokens that prompt and answer can have together."""
        wanted = request.params.max_tokens
        return self.max_seq_len if wanted is None else min(self.max_seq_len, len(request.prompt_ids) + wanted)

    def _plan_by_policy(self, seqs: Sequence[Seq], pool: BlockPool, limits: Limits) -> Plan:
        costs = SwapCosts(self._executor.info.swap_block_s, self._timer.token_s)
        asks_tier = self._transfers.may_ask(not any(seq.status is Status.RUNNING for seq in seqs))
        return plan_step(seqs, pool, limits, self._policy, self._oldest_wait_s(), costs, asks_tier)

    def _oldest_wait_s(self) -> float:
        """How long the oldest waiting request has waited; no matter when batches are not held back."""
        if self._limits.max_queue_delay_s == 0:
            return 0.0
        arrivals = (live.arrival_s for live in self._seqs.values() if live.seq.status is Status.WAITING)
        return self._clock() - min(arrivals, default=self._clock())

    def _draw_seed(self) -> int:
        return secrets.randbits(63) if self.config.seed is None else (self.config.seed + self._next_id) & (2**63 - 1)

    def _detokenizer(self, request: Request) -> Detokenizer:
        return Detokenizer(text_bytes(self._vocabulary, request.params.skip_special_tokens))

    def _lookup(self) -> PromptLookup | None:
        config = self.config
        if not config.num_speculative_tokens:
            return None
        return PromptLookup(config.prompt_lookup_min, config.prompt_lookup_max, config.num_speculative_tokens)

    def _introduce(self) -> list[NewSeq]:
        """Sequences of the plan that the rank has not seen."""
        new = []
        for step in self._plan.steps:
            live = self._seqs[step.seq.id]
            if not live.is_known:
                live.is_known = True
                self._counts["total_cached_tokens"] += step.seq.num_cached
                request = live.request
                prompt_ids = list(request.prompt_ids)
                new.append(NewSeq(live.seq.id, prompt_ids, request.params, live.seed, request.pooling, request.adapter))
        return new

    def _retire(self, live: _Live) -> None:
        """Take a request out: blocks freed, the rank told at the next step."""
        del self._by_request[live.request.id]
        if self._seqs.pop(live.seq.id, None) is not None:
            release_seq(live.seq, self._pool, Status.FINISHED)
            if live.is_known:
                self._dropped.append(live.seq.id)
        self._counts["total_finished"] += 1

    # -- what a step brought

    def _take_samples(self, live: _Live, samples: Sequence[Sample]) -> list[int]:
        """The sampled tokens that the answer has; those beyond its end are dropped."""
        seq, params = live.seq, live.request.params
        if params.max_tokens == 0:  # only the prompt's log-probabilities or its states were wanted
            live.finish = FinishReason.LENGTH
            self._fresh.append(_Fresh(live, None, None, live.finish))
            return []
        taken: list[int] = []
        for sample in samples:
            taken.append(sample.token_id)
            num_total, eos_ids = len(seq.token_ids) + len(taken), self._vocabulary.eos_ids
            num_output = num_total - seq.num_prompt
            live.finish = finish_of(sample.token_id, num_output, num_total, params, eos_ids, self.max_seq_len)
            self._fresh.append(_Fresh(live, sample.token_id, sample.logprob, live.finish))
            if live.finish is not None:
                break
        self._counts["total_output_tokens"] += len(taken)
        return taken

    def _go_on(self, live: _Live, num_drafted: int, num_accepted: int) -> None:
        """After its samples were taken: end the sequence, or guess what follows."""
        seq = live.seq
        self._counts["total_draft_tokens"] += num_drafted
        self._counts["total_accepted_tokens"] += num_accepted
        if live.finish is not None:
            del self._seqs[seq.id]
            release_seq(seq, self._pool, Status.FINISHED)
            self._dropped.append(seq.id)
        elif live.lookup is not None:
            live.lookup.learn(num_drafted, num_accepted)
            seq.draft = live.lookup.propose(seq.token_ids, seq.max_len - len(seq.token_ids) - 1)

    def _take_prompt_logprobs(self, chunk: PromptLogprobs) -> None:
        live = self._seqs.get(chunk.id)
        if live is None:
            return
        known = live.prompt_logprobs or [None]
        del known[chunk.start + 1 :]  # a preempted prompt is computed again
        live.prompt_logprobs = known + [_logprob(value) for value in chunk.values]

    def _drain(self) -> list[Delta]:
        """Deltas of the tokens sampled last, and of requests that ended without a step."""
        deltas, self._outbox = self._outbox, []
        fresh, self._fresh = self._fresh, []
        deltas += (delta for item in fresh for delta in self._emit(item))
        return deltas

    def _emit(self, fresh: _Fresh) -> Iterator[Delta]:
        live, finish = fresh.live, fresh.finish
        stop_reason: str | int | None = None
        if live.request.id not in self._by_request:  # aborted meanwhile
            return
        text = self._text_of(live, fresh)
        if live.stops.matched is not None:
            finish, stop_reason = FinishReason.STOP, live.stops.matched
        elif finish is FinishReason.STOP:
            stop_reason = fresh.token_id
        if finish is not None:
            self._retire(live)
        yield self._delta(live, text, fresh, finish, stop_reason)

    def _text_of(self, live: _Live, fresh: _Fresh) -> str:
        """Text that the token releases, stop strings applied; at the end also what was held back."""
        params = live.request.params
        text = ""
        is_stop_token = fresh.finish is FinishReason.STOP and not params.include_stop
        if fresh.token_id is not None and not is_stop_token:
            text = live.stops.add(live.detok.add(fresh.token_id))
        if fresh.finish is not None and live.stops.matched is None:
            text += live.stops.add(live.detok.finish())
            if live.stops.matched is None:
                text += live.stops.finish()
        return text

    def _delta(
        self,
        live: _Live,
        text: str = "",
        fresh: _Fresh | None = None,
        finish: FinishReason | None = None,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> Delta:
        token_id = fresh.token_id if fresh else None
        logprob = fresh.logprob if fresh else None
        prompt_logprobs, live.prompt_logprobs = live.prompt_logprobs, []
        params = live.request.params
        return Delta(
            request_id=live.request.id,
            text=text,
            token_ids=() if token_id is None else (token_id,),
            logprobs=() if logprob is None else (_logprob(logprob),),
            prompt_logprobs=tuple(prompt_logprobs) if prompt_logprobs else None,
            finish_reason=finish,
            stop_reason=stop_reason,
            num_cached_tokens=live.seq.num_cached,
            seed=None if params.is_greedy else live.seed,
            error=error,
            embedding=live.embedding,
        )


_COUNTED_ELSEWHERE = ("total_compute_s", "total_restarts", "total_tier_loaded_blocks", "total_tier_saved_blocks")
_COUNTERS = [f.name for f in fields(Stats) if f.name.startswith("total_") and f.name not in _COUNTED_ELSEWHERE]


def _logprob(value: Logprob) -> TokenLogprob:
    return TokenLogprob(value.token_id, value.logprob, tuple((token, logprob) for token, logprob in value.top))
