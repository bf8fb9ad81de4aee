"""maxDecodeGap: its cost in throughput, simulated with the real scheduler and measured step times. Pure."""

import math
from dataclasses import replace

from kvloom.contract.config import EngineConfig
from kvloom.engine.schedule.cost import Load
from kvloom.tuning.simulate import simulate
from kvloom.tuning.steptime import StepTimes
from kvloom.tuning.trace import Arrival
from kvloom.tuning.tune import Proposal, Workload

KEPT = 0.95  # share of the unlimited throughput that must be kept
_DECODE_STEPS = (4, 6, 8, 12, 16)  # gaps tried, in decode steps, if the default costs more
_MOST_REQUESTS = 384


def propose_gap(times: StepTimes, workload: Workload, config: EngineConfig, wanted_ms: float | None) -> Proposal:
    """The gap `wanted_ms` if given, else the shortest of several that keeps the throughput of `config`."""
    trace = _trace(times, workload, config.max_batch)

    def share(max_gap_s: float | None) -> float:
        return speed(max_gap_s) / best

    def speed(max_gap_s: float | None) -> float:
        return simulate(trace, replace(config, max_gap_s=max_gap_s), times).figures.generate_speed

    best = speed(0.0)
    if wanted_ms is not None:
        return Proposal("maxDecodeGap", wanted_ms, f"as asked for; {share(wanted_ms / 1e3):.0%} of the throughput of 0")
    step_ms = 1e3 * _decode_s(times, workload, config.max_batch)
    if (kept := share(None)) >= KEPT:
        told = f"three decode steps, {3 * step_ms:.0f} ms with a full batch; {kept:.0%} of the throughput of 0"
        return Proposal("maxDecodeGap", -1, told)
    for steps in _DECODE_STEPS:
        gap_ms = round(steps * step_ms, 1)
        if (kept := share(gap_ms / 1e3)) >= KEPT:
            return Proposal("maxDecodeGap", gap_ms, f"{steps} decode steps; {kept:.0%} of the throughput of 0")
    return Proposal(
        "maxDecodeGap", 0, f"no gap up to {_DECODE_STEPS[-1]} decode steps keeps {KEPT:.0%} of the throughput"
    )


def _trace(times: StepTimes, workload: Workload, batch: int) -> list[Arrival]:
    """A trace of as many requests as the engine can serve, one after the other, so that prompts always run beside
    decodes.
    """
    num_input, num_output = math.ceil(workload.average_input), max(1, round(workload.average_output))
    prefill_s = times.step_s(Load(num_input, 1, num_input * (num_input + 1) // 2))
    every_s = prefill_s + num_output * _decode_s(times, workload, batch) / batch
    return [Arrival(i * every_s, num_input, num_output) for i in range(min(_MOST_REQUESTS, 3 * batch))]


def _decode_s(times: StepTimes, workload: Workload, batch: int) -> float:
    length = workload.average_input + workload.average_output / 2
    return times.step_s(Load(batch, batch, round(batch * length)))
