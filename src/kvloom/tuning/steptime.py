"""How long a step takes: a model with a few parameters, fitted to steps of the real engine."""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from kvloom.contract.config import EngineConfig, Limits
from kvloom.contract.errors import BadRequest
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.engine.schedule.blocks import BlockPool
from kvloom.engine.schedule.cost import Load, load_of
from kvloom.engine.schedule.scheduler import plan_step
from kvloom.engine.schedule.seq import Plan, Seq
from kvloom.mistakes import reason_of
from kvloom.rank.byte_tokenizer import ByteTokenizer
from kvloom.rank.opening import open_ranks
from kvloom.reading import read_bytes

FEW_TOKENS = 8  # up to this many tokens a step is mostly bound by reading weights, beyond by arithmetic
_OUTLIER = 4.0  # times the median error; steps with larger errors (another program ran) are ignored
_ANSWER = 24  # tokens of each answer while measuring
_PROMPTS = (16, 128, 512)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

Progress = Callable[[int, int], object]  # workloads done, of how many


class StepTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of each part of a step, none negative, and the properties of the engine measured."""

    base_s: float
    few_token_s: float  # each of the first FEW_TOKENS tokens
    token_s: float  # each further token
    sample_s: float
    kilopair_s: float  # 1000 pairs of query and key
    model: str
    num_blocks: int
    block_size: int
    max_seq_len: int
    kv_bytes: int = 0
    weight_bytes: int = 0
    vocab_size: int = 0
    swap_block_s: float = 0.0
    median_error: float = 0.0  # relative, over the measured steps

    def step_s(self, load: Load) -> float:
        """Predicted seconds of a step."""
        parts = (self.base_s, self.few_token_s, self.token_s, self.sample_s, self.kilopair_s)
        return sum(part * amount for part, amount in zip(parts, _basis(load), strict=True))


def _basis(load: Load) -> tuple[float, ...]:
    """The amounts that the parts of StepTimes are multiplied with, in the same order."""
    few = min(load.num_tokens, FEW_TOKENS)
    return (1.0, few, load.num_tokens - few, load.num_samples, load.num_pairs / 1000)


def fit(loads: Sequence[Load], seconds: Sequence[float]) -> tuple[float, ...]:
    """Parts that minimise the relative error over the steps, none negative. Needs at least one step."""
    wanted = np.array(seconds)
    rows = np.array([_basis(load) for load in loads]) / wanted[:, None]
    parts = _nonnegative(rows)
    errors = np.abs(rows @ parts - 1)
    kept = errors <= max(_OUTLIER * float(np.median(errors)), 1e-6)
    return tuple(map(float, _nonnegative(rows[kept])))


def _nonnegative(
    rows: "np.ndarray[tuple[int, int], np.dtype[np.float64]]",
) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Least squares of rows @ x = 1 with x >= 0: parts that come out negative are removed, the most negative first."""
    active = list(range(rows.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(rows[:, active], np.ones(len(rows)), rcond=None)
        if len(active) == 1 or found.min() >= 0:
            parts = np.zeros(rows.shape[1])
            parts[active] = np.maximum(found, 0)
            return parts
        del active[int(found.argmin())]


class _Recorder:
    """A planner that records the load of each step."""

    def __init__(self) -> None:
        self.load = Load(0, 0, 0)

    def __call__(self, seqs: Sequence[Seq], pool: BlockPool, limits: Limits) -> Plan:
        plan = plan_step(seqs, pool, limits)
        self.load = load_of(plan)
        return plan


def timed_steps(engine: Engine, recorder: _Recorder, requests: Sequence[Request]) -> Iterator[tuple[Load, float]]:
    """Run the requests to their end. Yields each step's load and seconds, the engine's own work included."""
    for request in requests:
        engine.add(request)
    while engine.has_work:
        started_s = time.perf_counter()
        engine.start_step()
        load = recorder.load
        engine.finish_step()
        if load.num_tokens:
            yield load, time.perf_counter() - started_s


def measure(config: EngineConfig, progress: Progress = lambda done, total: None, most: int | None = None) -> StepTimes:
    """Load the model, and time steps of many batch sizes, up to `most`, and prompt lengths; takes up to a minute."""
    executor, recorder = open_ranks(replace(config, run_ahead=False), list), _Recorder()  # step by step
    try:
        engine = Engine(config, executor, ByteTokenizer(), recorder)
        loads, seconds = [], []
        largest = min(config.max_batch, most or config.max_batch)
        work = list(_workloads(engine.max_seq_len, executor.info.vocab_size, largest))
        for done, requests in enumerate(work):
            progress(done, len(work))
            for load, step_s in timed_steps(engine, recorder, requests):
                loads.append(load)
                seconds.append(step_s)
        progress(len(work), len(work))
        info = executor.info
    finally:
        executor.close()
    base_s, few_token_s, token_s, sample_s, kilopair_s = fit(loads, seconds)
    times = StepTimes(
        base_s=base_s,
        few_token_s=few_token_s,
        token_s=token_s,
        sample_s=sample_s,
        kilopair_s=kilopair_s,
        model=config.model,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_seq_len=engine.max_seq_len,
        kv_bytes=info.kv_bytes,
        weight_bytes=info.weight_bytes,
        vocab_size=info.vocab_size,
        swap_block_s=info.swap_block_s,
    )
    errors = [abs(times.step_s(load) / step_s - 1) for load, step_s in zip(loads, seconds, strict=True)]
    return msgspec.structs.replace(times, median_error=statistics.median(errors))


def _workloads(max_seq_len: int, vocab_size: int, max_batch: int) -> Iterator[list[Request]]:
    draw = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=_ANSWER, ignore_eos=True)
    for batch in (n for n in _BATCHES if n <= max_batch):
        for length in _PROMPTS:
            if length + _ANSWER > max_seq_len or batch * length > 4096:
                continue
            prompts = [tuple(draw.randrange(vocab_size) for _ in range(length)) for _ in range(batch)]
            yield [Request(f"{batch}-{length}-{i}", prompt, params) for i, prompt in enumerate(prompts)]


def save_times(times: StepTimes, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(times)) + b"\n")


def load_times(path: Path) -> StepTimes:
    """Read step times from a file. Raises BadRequest that names the file."""
    try:
        return msgspec.json.decode(read_bytes(path), type=StepTimes)
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest(str(path), f"cannot be read as step times: {reason_of(error)}") from None
