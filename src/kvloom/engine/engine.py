"""Engine: requests in, deltas out, one step at a time. No thread, no asyncio, no HTTP.

A step has two halves, so that detokenising overlaps the model's work:

  start_step   plan -> hand the batch to the executor -> detokenise the tokens of the step before
               -> if possible, plan and hand over the next batch too, so that the model never waits for the engine
  finish_step  wait for the oldest batch -> append tokens, publish blocks, end sequences
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from kvloom.contract.capabilities import check_capable
from kvloom.contract.config import EngineConfig, Limits
from kvloom.contract.errors import BadRequest
from kvloom.contract.messages import Batch, NewSeq, Sample
from kvloom.contract.request import Delta, FinishReason, Request, check_request
from kvloom.contract.tokenizer import Tokenizer
from kvloom.engine.adapters import Adapter, Adapters
from kvloom.engine.completed import StepSize
from kvloom.engine.counts import Counts, gauges
from kvloom.engine.drafting import Drafting
from kvloom.engine.giving import GivenEnds, check_giving, giving_of
from kvloom.engine.limits import limits_of, pool_of
from kvloom.engine.link.executor import Executor
from kvloom.engine.live import Arrivals, Fresh, Live, oldest_wait_s
from kvloom.engine.schedule import commit
from kvloom.engine.schedule.again import Again
from kvloom.engine.schedule.ahead import may_follow, must_wait
from kvloom.engine.schedule.blocks import BlockPool
from kvloom.engine.schedule.pace import Pace
from kvloom.engine.schedule.policies import Turns, policy_of
from kvloom.engine.schedule.scheduler import Circumstances, plan_step
from kvloom.engine.schedule.seq import Plan, Seq, Status
from kvloom.engine.schedule.suspicion import accuse, next_alone
from kvloom.engine.schedule.swap import SwapCosts
from kvloom.engine.schedule.transfers import Transfers
from kvloom.engine.stats import Stats
from kvloom.engine.text.stop import Ends
from kvloom.engine.verbose import tell_plan

Planner = Callable[[Sequence[Seq], BlockPool, Limits], Plan]  # plan_step, or a policy on top of it
GUILTY = "the model's process died twice while it computed this request, the second time of this request alone"


class Engine:
    """Owns the sequences and the block pool of one model. Call it from one thread.

    Requests wait in order of arrival; every added request gets exactly one delta with a finish_reason.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        vocabulary: Tokenizer,
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
        self._seqs: dict[int, Live] = {}  # arrival order
        self._by_request: dict[str, Live] = {}
        self._arrivals = Arrivals(config, vocabulary)
        self._fresh: list[Fresh] = []
        self._giving = GivenEnds()
        self._outbox: list[Delta] = []  # deltas that come from no step: of requests that end before their first one
        self._under_way: deque[Plan] = deque()  # plans submitted and not collected, oldest first
        self._counts = Counts()
        self._pace = Pace(config.max_gap_s, config.step_timeout_s)
        self._drafting = Drafting(config, self._pace, clock, executor.info.reads_along)
        self.reset()

    def reset(self) -> None:
        """Forget what the old rank knew: all sequences wait, to be computed again by the new one."""
        info = self._executor.info
        self.max_seq_len = min(info.max_seq_len, self.config.max_seq_len or info.max_seq_len)
        self.max_seq_len = min(self.max_seq_len, info.num_blocks * info.block_size)
        self._ends = Ends(self._vocabulary.eos_ids, self.max_seq_len)
        self._limits, self._pool = limits_of(self.config, info), pool_of(self.config, info)
        tier = self.config.kv_tier
        self._transfers = Transfers(self._pool, tier.timeout_s if tier else None)
        self._plan = Plan()  # the last one
        self._again = Again(info.takes_again)
        self.last_step = StepSize()
        self._dropped: list[int] = []
        self._under_way.clear()
        self._giving.lose_rank()
        for live in self._seqs.values():
            live.lose_rank()

    @property
    def has_work(self) -> bool:
        """Whether `start_step` has anything to compute, deliver or move."""
        return bool(self._by_request or self._fresh or self._outbox or self._under_way or self._transfers.is_pending)

    @property
    def is_stalled(self) -> bool:
        """Whether the last step computed nothing, and the next one cannot either until the outer tier answers."""
        is_working = self._under_way or self._plan.steps or self._outbox or self._plan.preempted
        return not is_working and self._transfers.is_pending

    def add(self, request: Request) -> None:
        """Accept a request. Raises BadRequest when it can never run, NotFound when its adapter is gone."""
        check_request(request, self.max_seq_len, self._executor.info.vocab_size)
        check_capable(self._executor.info.lacks, request, request.adapter)
        check_giving(request, self._executor.info, self._transfers.pool if self.config.kv_tier else None)
        if request.id in self._by_request:
            raise BadRequest("request_id", f"{request.id!r} is in use by a running request")
        live = self._arrivals.live(request, self.max_seq_len, self.adapters.scope(request), self._clock())
        request, seq = live.request, live.seq
        seq.priority = request.priority
        seq.turn = self._turns.turn(live.arrival_s, seq.max_len, request.tenant, request.priority, request.slo_s)
        seq.is_whole = self._executor.info.sees_ahead
        seq.may_reuse = request.may_reuse and not seq.is_whole
        seq.giving = giving_of(request, self._executor.info)
        self._arrivals.hash(live, self._limits.block_size)
        self._drafting.begin(live)
        self._counts.add("total_requests")
        self._counts.add("total_prompt_tokens", seq.num_prompt)
        self._by_request[request.id] = live
        if request.computes_nothing:
            self._retire(live)
            self._outbox.append(live.delta(FinishReason.LENGTH))
        else:
            self._seqs[seq.id] = live

    def abort(self, request_id: str) -> None:
        """End a request now; its blocks are free at once. Unknown and finished ids are ignored."""
        live = self._by_request.get(request_id)
        if live is not None:
            self._retire(live)
            self._fresh = [fresh for fresh in self._fresh if fresh.live is not live]
            self._outbox.append(live.delta(FinishReason.ABORT, text=live.stops.finish()))

    def fail_all(self, error: str) -> list[Delta]:
        """End every request with an error: the state of the model or of this engine cannot be trusted any more.

        Touches neither sequences nor blocks; call `reset` before the next request. Returns the last deltas.
        """
        deltas, self._outbox, self._fresh = self._outbox, [], []
        deltas += [replace(live.delta(FinishReason.ERROR), error=error) for live in self._by_request.values()]
        self._counts.add("total_finished", len(self._by_request))
        self._seqs.clear()
        self._by_request.clear()
        self._giving = GivenEnds()
        return deltas

    def suspend(self) -> list[Delta]:
        """The rank died: running requests wait for its successor. Of the requests that it was computing, those that
        were suspects already end with an error.

        Returns the deltas of tokens that had arrived. Call `resume` before the next step.
        """
        deltas = self._drain()
        for seq in accuse(self.computing):
            self._fail(self._seqs[seq.id], GUILTY)
            self._counts.add("total_guilty")
        self._counts.add("total_crashes")
        self.reset()
        return deltas + self._drain()

    def resume(self, lost: Mapping[int, str]) -> list[Delta]:
        """A new rank is loaded. Returns the last deltas of requests that cannot continue; `lost` gives the reason by
        adapter id.
        """
        self.reset()
        for live in list(self._seqs.values()):
            error = lost.get(live.request.adapter)
            if error is None and live.seq.max_len > self.max_seq_len:
                error = f"the model came back with room for {self.max_seq_len} tokens, too few for this request"
            if error is not None:
                self._fail(live, error)
        return self._drain()

    def reset_prefix_cache(self, preempts: bool = False) -> None:
        """Between two steps: later requests find no block that is cached now. Blocks in the outer tier stay there.

        Running requests keep their blocks; with `preempts` they are computed again. Raises RankDied.
        """
        if preempts:
            self.settle()
            running = [live.seq for live in self._seqs.values() if live.seq.status is Status.RUNNING]
            commit.apply_step(Plan(preempted=tuple(running)), self._pool)
            self._counts.add("total_preemptions", len(running))
        self._pool.forget_all()
        self._drafting.forget()

    def release_free(self) -> None:
        """When idle: give the memory of blocks that no sequence holds back to the system, and forget the prefixes
        cached there. Blocks in the outer tier stay there. Raises RankDied.
        """
        self._drafting.forget()
        self._plan, dropped, self._dropped = Plan(), self._dropped, []
        self._under_way.append(self._plan)
        windows = [] if self._pool.windows is None else self._pool.windows.drop_cached()
        self._executor.submit(Batch([], [], dropped, release=self._pool.drop_cached(), release_windows=windows))
        self.settle()

    def load_adapter(self, path: str) -> Adapter:
        """A LoRA adapter from a folder. Raises BadRequest, RankDied."""
        self.settle()
        return self.adapters.load(path)

    def step(self) -> list[Delta]:
        """start_step and finish_step. Returns the deltas of the step before."""
        deltas = self.start_step()
        self.finish_step()
        return deltas

    def start_step(self) -> list[Delta]:
        """Start the next step on the model, and return the deltas of the last one. Raises RankDied."""
        self._transfers.expire(self._clock())
        self.adapters.sweep()
        if not self._under_way:
            self._plan = plan = self._next_plan()
            if plan.steps or plan.loads or plan.preempted or self._dropped or self._transfers.is_pending:
                self._submit(plan)
        self._outbox = self._drain()  # kept until it is returned: the rank may die before that
        self._run_ahead()
        return self._drain()

    def take_deltas(self) -> list[Delta]:
        """The deltas of the last step, at once: for callers whose executor overlaps nothing."""
        return self._drain()

    def finish_step(self) -> None:
        """Wait for the oldest step under way and take its tokens. Raises RankDied."""
        if not self._under_way:
            return
        output = self._executor.collect()
        plan = self._under_way.popleft()
        self.last_step = StepSize(len(plan.steps), self._pool.num_blocks - self._pool.num_free)
        num_tokens = sum(step.num_tokens for step in plan.steps)
        self._counts.step(len(plan.steps), num_tokens, output.compute_s)
        self._counts.add("total_stale_rows", sum(step.num_tokens for step in plan.steps if commit.is_stale(step)))
        self._drafting.learn(plan, output)
        for chunk in output.prompt_logprobs:
            if chunk.id in self._seqs:
                self._seqs[chunk.id].take_prompt_logprobs(chunk)
        for given_up in output.given_up:
            if live := self._seqs.get(given_up.id):  # a grammar that allows no first token can never continue
                self._fail(live, given_up.error, len(live.seq.token_ids) == live.seq.num_prompt)
        self._transfers.finish(output.moved, output.is_tier_up, output.pool)
        for pooled in output.pooled:
            if pooled.id in self._seqs:
                self._seqs[pooled.id].embedding = pooled.data
        samples = output.by_sequence(step.seq.id for step in plan.steps)
        steps = [s for s in plan.steps if s.seq.status is Status.RUNNING and s.seq.id in samples]
        taken = {step.seq.id: self._take(self._seqs[step.seq.id], samples[step.seq.id]) for step in steps}
        self._counts.add("total_output_tokens", sum(map(len, taken.values())))
        fresh = commit.commit_step(plan, taken, self._pool, self._limits.block_size)
        self._transfers.give(step.seq for step in plan.steps)
        for step in steps:
            live = self._seqs[step.seq.id]
            self._counts.drafts(*live.judge(self._drafting.num_drafted(step), len(samples[step.seq.id]) - 1))
            if live.finish is not None:
                self._end(live)
        self._transfers.save(fresh)
        going_on = [live for step in steps if (live := self._seqs.get(step.seq.id))]
        self._drafting.draft(going_on, output, self._executor.max_submitted > 1)
        self._drafting.ended(output.compute_s, bool(self._seqs) and not self._under_way)

    def settle(self) -> None:
        """Wait for all steps under way. Raises RankDied."""
        while self._under_way:
            self.finish_step()

    @property
    def computing(self) -> list[Seq]:
        """The sequences of the step that the rank computes now, without those that have ended meanwhile."""
        steps = self._under_way[0].steps if self._under_way else ()
        return [step.seq for step in steps if step.seq.status is Status.RUNNING]

    def stats(self) -> Stats:
        """Gauges of this moment and totals since the engine was made."""
        seqs = [live.seq for live in self._seqs.values()]
        now = gauges(seqs, self._pool, self._limits.max_batch, self._executor.info.state_bytes)
        return self._counts.stats(now | self._drafting.gauges(seqs), self._transfers.counts())

    def check(self) -> None:
        """Assert the invariants of sequences and blocks; cheap enough to run when idle."""
        seqs = [live.seq for live in self._seqs.values()]
        commit.check(seqs, self._pool, self._limits.block_size, *self._transfers.held())

    # -- steps

    def _next_plan(self) -> Plan:
        return self._planner([live.seq for live in self._seqs.values()], self._pool, self._limits)

    def _run_ahead(self) -> None:
        """Submit steps behind the one under way: as many as the executor takes and can already be planned."""
        while 0 < len(self._under_way) < self._executor.max_submitted and may_follow(self._under_way[-1]):
            plan = self._next_plan()
            if must_wait(plan):
                return
            self._plan = plan
            self._submit(plan)
            self._counts.add("total_steps_ahead", bool(plan.steps))

    def _submit(self, plan: Plan) -> None:
        tell_plan(plan, self._seqs, self._pool, self._limits)
        copies, windows = commit.swap_out(plan, self._pool), commit.swap_out_windows(plan)
        states = commit.swap_out_states(plan, self._pool)
        work = commit.apply_step(plan, self._pool)
        self._transfers.save_missing(plan.steps)
        self._transfers.load(plan.loads, self._clock())
        batch = Batch(self._introduce(plan), work, self._dropped, copies)
        batch.swap_out_windows, batch.swap_out_states = windows, states
        self._transfers.fill(batch)
        self._again.shorten(batch)
        self._drafting.send(batch, not self._under_way)
        self._under_way.append(plan)
        self._executor.submit(batch)
        self._dropped = []
        self._counts.add("total_steps", bool(work))
        self._counts.add("total_preemptions", len(plan.preempted))
        self._counts.add("total_swapped", len(plan.swapped))

    # -- requests

    def _plan_by_policy(self, seqs: Sequence[Seq], pool: BlockPool, limits: Limits) -> Plan:
        costs = SwapCosts(self._executor.info.swap_block_s, self._pace.token_s or None)
        alone = next_alone(seqs)
        limits = self._pace.limited(limits, seqs if alone is None else [alone])
        asks_tier = self._transfers.may_ask(not any(seq.status is Status.RUNNING for seq in seqs))
        now = Circumstances(self._policy, self._oldest_wait_s(), costs, asks_tier, alone)
        return plan_step(seqs, pool, limits, now)

    def _oldest_wait_s(self) -> float:
        """How long the oldest request has waited; 0 when the limits hold no batch back."""
        return 0.0 if self._limits.max_queue_delay_s == 0 else oldest_wait_s(self._seqs.values(), self._clock())

    def _introduce(self, plan: Plan) -> list[NewSeq]:
        """NewSeq for each sequence of the plan that the rank has not seen."""
        new = []
        for step in plan.steps:
            live = self._seqs[step.seq.id]
            if not live.is_known:
                live.count_start(self._counts, step)
                new.append(live.introduce())
        return new

    def _fail(self, live: Live, error: str, is_callers: bool = False) -> None:
        """End a request with an error."""
        self._retire(live)
        self._outbox.append(replace(live.delta(FinishReason.ERROR), error=error, is_callers=is_callers))

    def _retire(self, live: Live) -> None:
        """Remove a request: its blocks are free, and the rank is told with the next step."""
        del self._by_request[live.request.id]
        self._giving.drop(live.request.id)
        self._drafting.leave(live)
        if self._seqs.pop(live.seq.id, None) is not None:
            commit.release_seq(live.seq, self._pool, Status.FINISHED)
            if live.is_known:
                self._dropped.append(live.seq.id)
        self._counts.add("total_finished")

    # -- what a step brought

    def _take(self, live: Live, samples: Sequence[Sample]) -> list[int]:
        """Append the sampled tokens that belong to the answer."""
        fresh = live.take(samples, self._ends)
        self._fresh += fresh
        return [item.token.token_id for item in fresh if item.token is not None]

    def _end(self, live: Live) -> None:
        """Its last token is known."""
        del self._seqs[live.seq.id]
        commit.end_seq(live.seq, self._pool)
        self._dropped.append(live.seq.id)

    def _drain(self) -> list[Delta]:
        """Deltas of the tokens sampled last, and of requests that ended without a step."""
        deltas, self._outbox = self._outbox, []
        fresh, self._fresh = self._fresh, []
        for item in fresh:
            live = item.live
            if live.request.id in self._by_request:  # else it was aborted meanwhile
                delta = live.tell(item)
                if delta.finish_reason is not None:
                    if self._giving.hold(live, delta):
                        continue
                    self._retire(live)
                deltas.append(delta)
        for live, delta in self._giving.take(self._executor.info, self._transfers.pool):
            self._retire(live)
            deltas.append(delta)
        return deltas
