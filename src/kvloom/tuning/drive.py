"""Sends a data set through an engine as fast as its quotas allow, and times every token."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import ModelError
from kvloom.engine_api import InferenceEngine, InferenceRequest, InferenceResponse, Operation
from kvloom.tuning.figures import Figures, Times, figures

Progress = Callable[[int, int], object]  # requests done, output tokens
_POLL_S = 0.005  # seconds; changes of quotas are not announced


@dataclass(frozen=True, slots=True)
class Run:
    """`answers` and `times` are in the order of the prompts."""

    times: list[Times]
    answers: list[list[int]]
    figures: Figures


class _Collector:
    """Filled by the engine's callback, read here; the lock of `changed` guards all of it."""

    def __init__(self, num_requests: int, progress: Progress) -> None:
        self.changed = threading.Condition()
        self.times: list[Times | None] = [None] * num_requests
        self.answers: list[list[int]] = [[] for _ in range(num_requests)]
        self.num_done = self.num_tokens = 0
        self._progress = progress

    def on_response(self, response: InferenceResponse) -> None:
        now_s, index = time.perf_counter(), response.get_request_id().unsigned_int_value()
        _, output = response.immutable_output("OUTPUT_IDS")
        assert output is not None
        ids = output.buffer().tolist()
        with self.changed:
            times = self.times[index]
            assert times is not None
            times.take(len(ids), now_s)
            self.answers[index] += ids
            self.num_tokens += len(ids)
            if response.is_eos():
                times.ended_s, times.error = now_s, response.error
                self.num_done += 1
                self.changed.notify()
            self._progress(self.num_done, self.num_tokens)


def drive(
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    max_output: int | None = None,
    progress: Progress = lambda done, tokens: None,
    max_s: float | None = None,
) -> Run:
    """Run all prompts, as many at once as the engine batches. Raises ModelError when it cannot start.

    `max_output` limits every answer in addition to the engine's own limit. After `max_s` seconds running requests are
    stopped, and those never sent are missing from the result.
    """
    collector, engine = _Collector(len(prompts), progress), InferenceEngine()
    status = engine.init(collector.on_response, config)
    if not status.is_ok():
        raise ModelError(status.status_msg())
    try:
        started_s = time.perf_counter()
        deadline_s = None if max_s is None else started_s + max_s
        num_sent = _send(engine, prompts, max_output, collector, deadline_s)
        with collector.changed:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.perf_counter())
            if not collector.changed.wait_for(lambda: collector.num_done >= num_sent, left_s):
                _stop_all(engine, num_sent)
                collector.changed.wait_for(lambda: collector.num_done >= num_sent, 10.0)
        elapsed_s = time.perf_counter() - started_s
    finally:
        engine.finalize()
    times = [times for times in collector.times if times is not None]
    return Run(times, collector.answers, figures(times, elapsed_s))


def _send(
    engine: InferenceEngine,
    prompts: Sequence[Sequence[int]],
    max_output: int | None,
    collector: _Collector,
    deadline_s: float | None,
) -> int:
    """Send prompts while there is room, until the deadline. Returns how many were sent."""
    _, max_batch = engine.get_max_batch_size()
    for index, prompt in enumerate(prompts):
        while not _has_room(engine, max_batch):
            if deadline_s is not None and time.perf_counter() > deadline_s:
                return index
            with collector.changed:
                collector.changed.wait(_POLL_S)
        request = InferenceRequest(index)
        request.set_input_ids(prompt)
        if max_output is not None:
            request.set_max_output_len(max_output)
        with collector.changed:
            collector.times[index] = Times(len(prompt), time.perf_counter())
        status = engine.forward(request, valid_request=True)
        if not status.is_ok():
            raise ModelError(f"prompt {index + 1}: {status.status_msg()}")
    return len(prompts)


def _has_room(engine: InferenceEngine, max_batch: int) -> bool:
    _, num_processing = engine.get_processing_request()
    _, quotas = engine.get_request_block_quotas()
    return num_processing == 0 or (num_processing < max_batch and min(quotas) > 0)


def _stop_all(engine: InferenceEngine, num_sent: int) -> None:
    for index in range(num_sent):
        engine.control_request(index, Operation.STOP)
