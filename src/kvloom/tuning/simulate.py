"""Replays a trace of requests against the scheduler: real plans, with times from a model instead of a rank."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvloom.contract.config import EngineConfig
from kvloom.tuning.figures import Figures, Times, figures
from kvloom.tuning.machine import Machine
from kvloom.tuning.steptime import StepTimes
from kvloom.tuning.trace import Arrival, job_of

Progress = Callable[[int, int], object]  # requests done, of how many


@dataclass(frozen=True, slots=True)
class Simulated:
    """`times` are in the order of the trace, in seconds of the simulated clock."""

    times: list[Times]
    figures: Figures
    num_steps: int
    num_preempted: int
    num_swapped: int


def simulate(
    trace: Sequence[Arrival],
    config: EngineConfig,
    times: StepTimes,
    progress: Progress = lambda done, total: None,
) -> Simulated:
    """Simulate the trace on the engine of `config`.

    Sizes that `config` does not set (num_blocks, block_size, max_seq_len) are those of the measured engine. Raises
    BadRequest for a request that can never run.
    """
    machine = Machine(config, times)
    for number, arrival in enumerate(trace, 1):
        machine.check(number, arrival.prompt_tokens)
    runs = [Times(arrival.prompt_tokens, arrival.arrival_s) for arrival in trace]
    coming = deque(sorted(range(len(trace)), key=lambda i: trace[i].arrival_s))
    machine.now_s = first_s = trace[coming[0]].arrival_s if coming else 0.0
    num_done = 0
    while coming or machine.has_work:
        if not machine.has_work:
            machine.now_s = max(machine.now_s, trace[coming[0]].arrival_s)
        while coming and trace[coming[0]].arrival_s <= machine.now_s:
            machine.add(job_of(coming[0], trace[coming.popleft()]))
        for took in machine.step():
            run = runs[took.id]
            run.take(1, machine.now_s)
            if took.is_last:
                run.ended_s = machine.now_s
                num_done += 1
        progress(num_done, len(trace))
    counts = machine.counts
    found = figures(runs, machine.now_s - first_s)
    return Simulated(runs, found, counts.num_steps, counts.num_preempted, counts.num_swapped)
