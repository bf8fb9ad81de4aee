"""Machine: a simulated engine. Plans, blocks and policies are the engine's; StepTimes predict the time of each step."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvloom.contract.config import EngineConfig, Limits
from kvloom.contract.errors import BadRequest
from kvloom.engine.link.executor import max_submitted
from kvloom.engine.schedule.ahead import may_follow, must_wait
from kvloom.engine.schedule.blocks import BlockPool, extend_chain
from kvloom.engine.schedule.commit import apply_step, commit_step, release_seq, swap_out
from kvloom.engine.schedule.cost import load_of
from kvloom.engine.schedule.pace import Pace
from kvloom.engine.schedule.policies import MAX_SLO_S, Turns, policy_of
from kvloom.engine.schedule.scheduler import Circumstances, plan_step
from kvloom.engine.schedule.seq import Plan, Seq, Status
from kvloom.engine.schedule.snapshots import Snapshots
from kvloom.engine.schedule.swap import SwapCosts
from kvloom.tuning.steptime import StepTimes


@dataclass(frozen=True, slots=True)
class Job:
    """One request for a machine.

    tokens: its prompt, and the answer so far. Jobs with the same salt share prefixes.
    """

    id: int
    tokens: Sequence[int]
    num_output: int  # tokens still to be generated
    arrival_s: float
    salt: str = ""
    priority: int = 0
    tenant: str = ""
    slo_s: float = MAX_SLO_S


@dataclass(slots=True)
class Counts:
    num_steps: int = 0
    num_preempted: int = 0
    num_swapped: int = 0
    num_cached_tokens: int = 0  # tokens found in the cache at first admission
    num_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Took:
    """A token that a job gets at the end of a step."""

    id: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A submitted step, and its duration."""

    plan: Plan
    compute_s: float = 0.0
    copy_s: float = 0.0


@dataclass(slots=True)
class _Live:
    job: Job
    seq: Seq
    is_counted: bool = False


class Machine:
    """A simulated engine. Its clock, `now_s`, is at the end of its last step."""

    def __init__(self, config: EngineConfig, times: StepTimes) -> None:
        """Sizes that `config` does not set (num_blocks, block_size, max_seq_len) are those of the measured engine."""
        self.block_size = config.block_size or times.block_size
        self.num_blocks = config.num_blocks or times.num_blocks * times.block_size // self.block_size
        self.max_seq_len = min(config.max_seq_len or times.max_seq_len, self.num_blocks * self.block_size)
        self.max_output = config.max_iter_times
        self._times = times
        self._limits: Limits = config.limits(self.block_size)
        snapshots = Snapshots(0, 0, self.block_size)  # no layer has a state; sequences leave parts of blocks
        self._pool = BlockPool(self.num_blocks, config.enable_prefix_cache, config.num_host_blocks or 0, snapshots)
        self._policy = policy_of(config.prefill_policy, config.decode_policy)
        self._turns = Turns(config.fair_token_s)
        self._most_under_way = max_submitted(config)
        self._under_way: deque[_UnderWay] = deque()
        self._pace = Pace(config.max_gap_s, config.step_timeout_s)
        self._live: dict[int, _Live] = {}  # in order of arrival
        self.now_s = 0.0
        self.counts = Counts()

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def jobs(self) -> list[Job]:
        """Unfinished jobs, oldest first."""
        return [live.job for live in self._live.values()]

    def check(self, number: int, num_prompt: int) -> None:
        """Raises BadRequest for a prompt that can never run; `number`: the request's number in its trace."""
        if num_prompt >= self.max_seq_len:
            raise BadRequest(f"request {number}", f"prompt_tokens must be below {self.max_seq_len}, got {num_prompt}")

    def hashes_of(self, job: Job) -> list[bytes]:
        """Hashes of the full blocks of its tokens."""
        hashes: list[bytes] = []
        extend_chain(hashes, job.tokens, self.block_size, job.salt)
        return hashes

    def add(self, job: Job, hashes: Sequence[bytes] = ()) -> None:
        """Add a job to the queue. `hashes`: those of its first blocks, if known."""
        seq = Seq(job.id, list(job.tokens), len(job.tokens), salt=job.salt, hashes=list(hashes))
        seq.priority = job.priority
        wanted = min(job.num_output, self.max_output or job.num_output)
        seq.max_len = min(self.max_seq_len, len(job.tokens) + wanted)
        seq.turn = self._turns.turn(job.arrival_s, seq.max_len, job.tenant, job.priority, job.slo_s)
        extend_chain(seq.hashes, seq.token_ids, self.block_size, seq.salt)
        self._live[job.id] = _Live(job, seq)
        self.counts.num_prompt_tokens += len(job.tokens)

    def preload(self, hashes: Sequence[bytes]) -> None:
        """Cache blocks of a prompt that another machine has computed, as far as there is room."""
        known = len(self._pool.match(hashes))
        blocks = self._pool.allocate(min(len(hashes) - known, self._pool.num_free))
        for block, key in zip(blocks or (), hashes[known:], strict=False):
            self._pool.publish(block, key)
        self._pool.release(blocks or [])

    def step(self) -> list[Took]:
        """Run one step, which advances the clock. Returns the tokens at its end.

        As in the engine, the step after one that decodes is planned when that one begins: a job that arrives meanwhile
        is in neither of them.
        """
        if not self._under_way:
            self._submit(self._next_plan())
        while len(self._under_way) < self._most_under_way and may_follow(self._under_way[-1].plan):
            plan = self._next_plan()
            if must_wait(plan):
                break
            self._submit(plan)
        first = self._under_way.popleft()
        self.now_s += first.compute_s + first.copy_s
        if first.plan.steps:
            self._pace.learn(first.plan, first.compute_s)
        return self._commit(first.plan)

    def _next_plan(self) -> Plan:
        costs = SwapCosts(self._times.swap_block_s, self._times.token_s or None)
        now = Circumstances(self._policy, self._oldest_wait_s(), costs)
        seqs = [live.seq for live in self._live.values()]
        return plan_step(seqs, self._pool, self._pace.limited(self._limits, seqs), now)

    def _submit(self, plan: Plan) -> None:
        copies = swap_out(plan, self._pool)
        works = apply_step(plan, self._pool)
        num_copies = len(copies) + sum(len(work.loads) for work in works)
        if plan.steps:
            copy_s = num_copies * self._times.swap_block_s
            self._under_way.append(_UnderWay(plan, self._times.step_s(load_of(plan)), copy_s))
            self.counts.num_steps += 1
        else:
            self._under_way.append(_UnderWay(plan))
        self.counts.num_preempted += len(plan.preempted)
        self.counts.num_swapped += len(plan.swapped)
        self._count_cached(plan)

    def lose(self) -> list[Job]:
        """Lose all state. Returns the unfinished jobs."""
        jobs = self.jobs
        for live in self._live.values():
            release_seq(live.seq, self._pool, Status.FINISHED)
        self._live.clear()
        self._under_way.clear()
        self._pool.forget_all()
        return jobs

    def _count_cached(self, plan: Plan) -> None:
        for step in plan.steps:
            live = self._live[step.seq.id]
            if not live.is_counted:
                live.is_counted = True
                self.counts.num_cached_tokens += live.seq.num_cached

    def _oldest_wait_s(self) -> float:
        waiting = (live.job.arrival_s for live in self._live.values() if live.seq.status is Status.WAITING)
        return self.now_s - min(waiting, default=self.now_s)

    def _commit(self, plan: Plan) -> list[Took]:
        """Give each sequence whose last known token was computed one more; end those that have all their tokens."""
        sampled = {step.seq.id: [0] for step in plan.steps if step.start + step.num_tokens == len(step.seq.token_ids)}
        commit_step(plan, sampled, self._pool, self._limits.block_size)
        taken = []
        for id in sampled:
            seq = self._live[id].seq
            is_last = len(seq.token_ids) >= seq.max_len
            if is_last:
                release_seq(seq, self._pool, Status.FINISHED)
                del self._live[id]
            taken.append(Took(id, is_last))
        return taken
