"""Replay a trace of requests against the scheduler: the real plans, with times from a model instead of a rank."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from kvloom.contract.config import EngineConfig, Limits
from kvloom.contract.errors import BadRequest
from kvloom.engine.schedule.blocks import BlockPool, extend_chain
from kvloom.engine.schedule.commit import apply_step, commit_step, release_seq, swap_out
from kvloom.engine.schedule.cost import load_of
from kvloom.engine.schedule.pace import Pace
from kvloom.engine.schedule.policies import MAX_PRIORITY, MAX_SLO_S, Turns, policy_of
from kvloom.engine.schedule.scheduler import Circumstances, plan_step
from kvloom.engine.schedule.seq import Plan, Seq, Status
from kvloom.engine.schedule.swap import SwapCosts
from kvloom.tuning.figures import Figures, Times, figures
from kvloom.tuning.steptime import StepTimes

Progress = Callable[[int, int], object]  # requests done, of how many


class Arrival(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a trace."""

    arrival_s: Annotated[float, msgspec.Meta(ge=0)]
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1)]
    output_tokens: Annotated[int, msgspec.Meta(ge=1)]
    priority: Annotated[int, msgspec.Meta(ge=0, le=MAX_PRIORITY)] = 0
    slo_s: Annotated[float, msgspec.Meta(gt=0)] = MAX_SLO_S
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Simulated:
    """`times` are in the order of the trace, in seconds of the simulated clock."""

    times: list[Times]
    figures: Figures
    num_steps: int
    num_preempted: int
    num_swapped: int


def read_trace(path: Path) -> list[Arrival]:
    """JSONL, in any order. Raises BadRequest with file and line."""
    arrivals = []
    try:
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            if line.strip():
                try:
                    arrivals.append(msgspec.json.decode(line, type=Arrival))
                except msgspec.MsgspecError as error:
                    raise BadRequest(f"{path}, line {number}", str(error)) from None
    except OSError as error:
        raise BadRequest(str(path), f"cannot be read: {error.strerror}") from None
    if not arrivals:
        raise BadRequest(str(path), "holds no request")
    return arrivals


def simulate(
    trace: Sequence[Arrival],
    config: EngineConfig,
    times: StepTimes,
    progress: Progress = lambda done, total: None,
) -> Simulated:
    """What the engine of `config` would do with the trace. No prompt shares a prefix with another.

    Sizes that `config` leaves open (num_blocks, block_size, max_seq_len) are those of the measured engine. Raises
    BadRequest for a request that can never run.
    """
    machine = _Machine(trace, config, times)
    while machine.has_work:
        machine.step()
        progress(machine.num_done, len(trace))
    return machine.result()


class _Machine:
    """The state of a simulation."""

    def __init__(self, trace: Sequence[Arrival], config: EngineConfig, times: StepTimes) -> None:
        block_size = config.block_size or times.block_size
        num_blocks = config.num_blocks or times.num_blocks * times.block_size // block_size
        max_seq_len = min(config.max_seq_len or times.max_seq_len, num_blocks * block_size)
        for number, arrival in enumerate(trace, 1):
            if arrival.prompt_tokens >= max_seq_len:
                raise BadRequest(
                    f"request {number}", f"prompt_tokens must be below {max_seq_len}, got {arrival.prompt_tokens}"
                )
        self._trace, self._times, self._max_seq_len = trace, times, max_seq_len
        self._limits: Limits = config.limits(block_size)
        self._pool = BlockPool(num_blocks, config.enable_prefix_cache, config.num_host_blocks or 0)
        self._policy = policy_of(config.prefill_policy, config.decode_policy)
        self._turns = Turns(config.fair_token_s)
        self._pace = Pace(config.max_gap_s, config.step_timeout_s)
        self._max_output = config.max_iter_times
        order = sorted(range(len(trace)), key=lambda i: trace[i].arrival_s)
        self._coming = deque(order)
        self._live: dict[int, Seq] = {}  # in order of arrival
        self._runs = [Times(a.prompt_tokens, a.arrival_s) for a in trace]
        self._now_s = trace[order[0]].arrival_s if trace else 0.0
        self.num_done = self._num_steps = self._num_preempted = self._num_swapped = 0

    @property
    def has_work(self) -> bool:
        return bool(self._coming or self._live)

    def step(self) -> None:
        if not self._live:
            self._now_s = max(self._now_s, self._trace[self._coming[0]].arrival_s)
        while self._coming and self._trace[self._coming[0]].arrival_s <= self._now_s:
            self._arrive(self._coming.popleft())
        costs = SwapCosts(self._times.swap_block_s, self._times.token_s or None)
        now = Circumstances(self._policy, self._oldest_wait_s(), costs)
        seqs = list(self._live.values())
        plan = plan_step(seqs, self._pool, self._pace.limited(self._limits, seqs), now)
        copies = swap_out(plan, self._pool)
        works = apply_step(plan, self._pool)
        num_copies = len(copies) + sum(len(work.loads) for work in works)
        if plan.steps:
            compute_s = self._times.step_s(load_of(plan))
            self._now_s += compute_s + num_copies * self._times.swap_block_s
            self._pace.learn(plan, compute_s)
            self._num_steps += 1
        self._num_preempted += len(plan.preempted)
        self._num_swapped += len(plan.swapped)
        self._commit(plan)

    def result(self) -> Simulated:
        first_s = min((a.arrival_s for a in self._trace), default=0.0)
        found = figures(self._runs, self._now_s - first_s)
        return Simulated(self._runs, found, self._num_steps, self._num_preempted, self._num_swapped)

    def _arrive(self, index: int) -> None:
        arrival = self._trace[index]
        wanted = min(arrival.output_tokens, self._max_output or arrival.output_tokens)
        # a salt of its own and one token repeated: a prefix that only it can find again
        seq = Seq(index, [0] * arrival.prompt_tokens, arrival.prompt_tokens, salt=str(index))
        seq.priority = arrival.priority
        seq.max_len = min(self._max_seq_len, arrival.prompt_tokens + wanted)
        seq.turn = self._turns.turn(arrival.arrival_s, seq.max_len, arrival.tenant, arrival.priority, arrival.slo_s)
        extend_chain(seq.hashes, seq.token_ids, self._limits.block_size, seq.salt)
        self._live[index] = seq

    def _oldest_wait_s(self) -> float:
        waiting = (self._trace[i].arrival_s for i, seq in self._live.items() if seq.status is Status.WAITING)
        return self._now_s - min(waiting, default=self._now_s)

    def _commit(self, plan: Plan) -> None:
        """Every sequence whose last known token was computed gets one more; those with all of theirs end."""
        sampled = {step.seq.id: [0] for step in plan.steps if step.start + step.num_tokens == len(step.seq.token_ids)}
        commit_step(plan, sampled, self._pool, self._limits.block_size)
        for index in sampled:
            seq, run = self._live[index], self._runs[index]
            run.take(1, self._now_s)
            if len(seq.token_ids) >= seq.max_len:
                run.ended_s = self._now_s
                release_seq(seq, self._pool, Status.FINISHED)
                del self._live[index]
                self.num_done += 1
