"""Replay a trace against a fleet: every replica is a Machine with its own clock; requests are routed on arrival.

The simulation is a heap of events ordered by time. A step's tokens are not known before it has ended.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest
from kvloom.tuning.figures import Figures, Times, figures
from kvloom.tuning.fleet.routing import ROUTINGS, Ask, Routing
from kvloom.tuning.machine import Job, Machine, Took
from kvloom.tuning.steptime import StepTimes
from kvloom.tuning.trace import Arrival, job_of

MAX_MOVES = 2  # most moves of a request whose replica is lost, as in a fleet
Progress = Callable[[int, int], object]  # requests done, of how many


@dataclass(frozen=True, slots=True)
class Failure:
    """`at_s` seconds into the trace a replica is lost, with its state, and comes back `down_s` later."""

    at_s: float
    replica: int  # index among the replicas that answer, from 0
    down_s: float


@dataclass(frozen=True, slots=True)
class Shape:
    """The replicas of a fleet. `num_prefill` additional ones compute the prompts of at least `prefill_from` tokens.

    pool_bytes_s: the rate at which a replica loads blocks of such a prompt from the pool.
    """

    num_replicas: int
    routing: str = "prefix"
    num_prefill: int = 0
    prefill_from: int = 512
    pool_bytes_s: float = 2e9
    failures: tuple[Failure, ...] = ()

    def __post_init__(self) -> None:
        """Raises BadRequest naming the field."""
        if self.num_replicas < 1:
            raise BadRequest("replicas", f"must be at least 1, got {self.num_replicas}")
        if self.routing not in ROUTINGS:
            raise BadRequest("routing", f"must be one of {', '.join(ROUTINGS)}, got {self.routing!r}")
        for failure in self.failures:
            if failure.replica >= self.num_replicas:
                last = self.num_replicas - 1
                raise BadRequest("fail", f"must name one of the replicas 0 to {last}, got {failure.replica}")


@dataclass(frozen=True, slots=True)
class FleetSimulated:
    """`times` are in the order of the trace. hit_rate: share of prompt tokens found in a replica's cache."""

    times: list[Times]
    figures: Figures
    hit_rate: float
    num_moves: int
    num_steps: int
    tpot_ms: list[float]  # for each request with two or more tokens, the mean time per token after the first


@dataclass(slots=True)
class _Visit:
    """A request, from its arrival to its end."""

    job: Job
    run: Times
    hashes: list[bytes] = field(default_factory=list)
    where: str = ""  # the replica that has it
    num_moves: int = 0
    is_over: bool = False

    @property
    def num_left(self) -> int:
        return self.job.num_output - self.run.num_output

    def rest(self, now_s: float) -> Job:
        """The rest of the request as a Job, whose prompt includes the answer so far."""
        job = self.job
        tokens = [*job.tokens, *[0] * self.run.num_output]
        return Job(job.id, tokens, self.num_left, now_s, job.salt, job.priority, job.tenant, job.slo_s)


def simulate_fleet(
    trace: Sequence[Arrival],
    config: EngineConfig,
    times: StepTimes,
    shape: Shape,
    progress: Progress = lambda done, total: None,
) -> FleetSimulated:
    """Simulate the trace on a fleet of such engines. Raises BadRequest for a request that can never run."""
    fleet = _Fleet(config, times, shape)
    return fleet.run(trace, progress)


class _Fleet:
    def __init__(self, config: EngineConfig, times: StepTimes, shape: Shape) -> None:
        self._shape = shape
        self._answering = [f"replica-{i}" for i in range(shape.num_replicas)]
        self._prefilling = [f"prefill-{i}" for i in range(shape.num_prefill)]
        self._machines = {name: Machine(config, times) for name in (*self._answering, *self._prefilling)}
        self._lives = dict.fromkeys(self._machines, 0)  # number of times that each was lost
        self._down: set[str] = set()
        self._routings = {True: self._routing(self._prefilling), False: self._routing(self._answering)}
        self._block_s = times.kv_bytes / max(1, times.num_blocks) / shape.pool_bytes_s
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = count()
        self._visits: list[_Visit] = []
        self._waiting: list[int] = []  # no replica is up for them
        self._num_over = self._num_moves = 0
        self._ended_s = 0.0

    def run(self, trace: Sequence[Arrival], progress: Progress) -> FleetSimulated:
        first = next(iter(self._machines.values()))
        for index, arrival in enumerate(trace):
            first.check(index + 1, arrival.prompt_tokens)
            self._visits.append(_Visit(job_of(index, arrival), Times(arrival.prompt_tokens, arrival.arrival_s)))
            self._at(arrival.arrival_s, partial(self._come, index))
        started_s = min((arrival.arrival_s for arrival in trace), default=0.0)
        for failure in self._shape.failures:
            self._at(started_s + failure.at_s, partial(self._fail, failure))
        while self._num_over < len(self._visits):
            self._advance()
            progress(self._num_over, len(trace))
        return self._result(self._ended_s - started_s)

    def _advance(self) -> None:
        """Process the next event, or the next step that begins before it."""
        busy = [(machine.now_s, name) for name, machine in self._machines.items() if machine.has_work]
        next_s = self._events[0][0] if self._events else float("inf")
        if busy and min(busy)[0] < next_s:
            self._step(min(busy)[1])
        elif self._events:
            now_s, _, happen = heapq.heappop(self._events)
            happen(now_s)
        else:
            for index in self._waiting:
                self._end(index, self._ended_s, "no replica is left")

    def _at(self, time_s: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._number), happen))

    def _step(self, name: str) -> None:
        machine, life = self._machines[name], self._lives[name]
        for took in machine.step():
            self._at(machine.now_s, partial(self._take, name, life, took))

    # -- requests

    def _come(self, index: int, now_s: float) -> None:
        """A request arrives: send it to a prefill replica if its prompt is long, else to one that answers."""
        visit = self._visits[index]
        is_long = len(visit.job.tokens) >= self._shape.prefill_from and visit.run.num_output == 0
        self._send(index, now_s, is_prefill=is_long and any(name not in self._down for name in self._prefilling))

    def _send(self, index: int, now_s: float, is_prefill: bool = False, is_loaded: bool = False) -> None:
        names = self._prefilling if is_prefill else self._answering
        up = [name for name in names if name not in self._down]
        if not up:
            self._waiting.append(index)
            return
        visit, routing = self._visits[index], self._routings[is_prefill]
        job = visit.rest(now_s)
        if not visit.hashes:
            visit.hashes = self._machines[up[0]].hashes_of(job)
        visit.where = routing.route(Ask(index, visit.hashes, len(job.tokens)), up)
        machine = self._machines[visit.where]
        if not machine.has_work:
            machine.now_s = max(machine.now_s, now_s)
        if is_loaded:
            machine.preload(visit.hashes)
        machine.add(_first_token_of(job) if is_prefill else job, visit.hashes)

    def _take(self, name: str, life: int, took: Took, now_s: float) -> None:
        """Deliver a token, unless its replica was lost before the step had ended."""
        visit = self._visits[took.id]
        if life != self._lives[name] or visit.is_over:
            return
        visit.run.take(1, now_s)
        routing = self._routings[name in self._prefilling]
        routing.begun(took.id)
        if not took.is_last:
            return
        routing.ended(took.id)
        if name in self._prefilling and visit.num_left > 0:
            visit.where = ""
            after_s = now_s + len(visit.hashes) * self._block_s
            self._at(after_s, lambda then_s: self._send(took.id, then_s, is_loaded=True))
        else:
            self._end(took.id, now_s)

    def _end(self, index: int, now_s: float, error: str = "") -> None:
        visit = self._visits[index]
        visit.is_over, visit.run.ended_s, visit.run.error = True, now_s, error
        self._num_over += 1
        self._ended_s = max(self._ended_s, now_s)

    # -- replicas

    def _fail(self, failure: Failure, now_s: float) -> None:
        name = self._answering[failure.replica]
        if name in self._down:
            return
        self._down.add(name)
        self._lives[name] += 1
        self._machines[name].lose()
        self._at(now_s + failure.down_s, lambda then_s: self._come_back(name, then_s))
        for index, visit in enumerate(self._visits):
            if visit.where == name and not visit.is_over:
                self._routings[False].ended(index)
                visit.where, visit.num_moves = "", visit.num_moves + 1
                self._num_moves += 1
                if visit.num_moves > MAX_MOVES:
                    self._end(index, now_s, "it was moved too often")
                else:
                    self._send(index, now_s)

    def _come_back(self, name: str, now_s: float) -> None:
        self._down.discard(name)
        self._machines[name].now_s = now_s
        waiting, self._waiting = self._waiting, []
        for index in waiting:
            self._come(index, now_s)

    def _routing(self, names: Sequence[str]) -> Routing:
        machines = [self._machines[name] for name in names]
        block_size = machines[0].block_size if machines else 1
        return ROUTINGS[self._shape.routing]({name: self._machines[name].num_blocks for name in names}, block_size)

    def _result(self, elapsed_s: float) -> FleetSimulated:
        runs = [visit.run for visit in self._visits]
        counts = [machine.counts for machine in self._machines.values()]
        num_cached, num_prompt = sum(c.num_cached_tokens for c in counts), sum(c.num_prompt_tokens for c in counts)
        good = [run for run in runs if not run.error and run.num_output > 1]
        tpot_ms = [1e3 * sum(run.gaps_s) / (run.num_output - 1) for run in good]
        hit_rate = num_cached / max(1, num_prompt)
        num_steps = sum(c.num_steps for c in counts)
        return FleetSimulated(runs, figures(runs, elapsed_s), hit_rate, self._num_moves, num_steps, tpot_ms)


def _first_token_of(job: Job) -> Job:
    return Job(job.id, job.tokens, 1, job.arrival_s, job.salt, job.priority, job.tenant, job.slo_s)
