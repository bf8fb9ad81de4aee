"""Executors hand batches to a runner: InProcessExecutor here, rank processes in ranks.py.

Between submit and collect the engine does other work. Batches run, and are collected, in the order of submission.
"""

from collections import deque
from typing import Protocol

from kvloom.contract.config import EngineConfig
from kvloom.contract.messages import AdapterInfo, Batch, RankInfo, Runner, StepOutput
from kvloom.processes.child import Died


class RankDied(Died):
    """The rank process is gone, takes too long, or its step failed. All its state is lost."""


class Process(Protocol):
    """A process that holds a model. Called from the engine's thread only, except `nudge` and `kill`."""

    info: RankInfo  # describes the loaded model; replaced by `restart`

    def load_adapter(self, id: int, path: str) -> AdapterInfo:
        """Load an adapter; waits until it is loaded. Not while a step is under way. Raises BadRequest, RankDied."""
        ...

    def unload_adapter(self, id: int) -> None:
        """Drop an adapter that no sequence of a later step uses. Raises RankDied."""
        ...

    def is_alive(self) -> bool:
        """False when the process is known to be dead, so that no later step can succeed."""
        ...

    def restart(self) -> None:
        """Load the model again; sequences, blocks and adapters are forgotten. Raises ModelError, RankDied."""
        ...

    def nudge(self) -> None:
        """From any thread: make a caller that waits long for the model return, because there are messages to handle."""

    def kill(self) -> None:
        """From any thread: end the process; callers that wait for it, in `restart` too, get RankDied at once."""

    def close(self) -> None:
        """Free the model's memory. `restart` may follow; safe to call twice."""
        ...


class Executor(Process, Protocol):
    """Runs the engine's batches on one model, one after the other."""

    max_submitted: int  # how many batches may be submitted before one is collected

    def submit(self, batch: Batch) -> None:
        """Start a batch, or queue it behind those under way, without waiting. Raises RankDied."""
        ...

    def collect(self) -> StepOutput:
        """Wait for the oldest batch that is not collected. Raises RankDied, also after the step timeout."""
        ...


def max_submitted(config: EngineConfig) -> int:
    """How many batches ranks of this configuration take at once. With 2 the next one starts as soon as the first has
    ended.
    """
    return 2 if config.run_ahead else 1


class InProcessExecutor:
    """Runs each batch at once in the caller's thread. Nothing overlaps, so running ahead would gain nothing."""

    def __init__(self, runner: Runner, max_submitted: int = 1) -> None:
        self.info = runner.info
        self.max_submitted = max_submitted
        self._runner = runner
        self._outputs: deque[StepOutput] = deque()

    def submit(self, batch: Batch) -> None:
        assert len(self._outputs) < self.max_submitted, "more steps are under way than agreed"
        self._outputs.append(self._runner.run(batch))
        self._runner.prepare_next()

    def collect(self) -> StepOutput:
        return self._outputs.popleft()

    def load_adapter(self, id: int, path: str) -> AdapterInfo:
        return self._runner.load_adapter(id, path)

    def unload_adapter(self, id: int) -> None:
        self._runner.unload_adapter(id)

    def is_alive(self) -> bool:
        return True

    def restart(self) -> None:
        raise RankDied("a runner in this process cannot be restarted")

    def nudge(self) -> None:
        pass

    def kill(self) -> None:
        pass

    def close(self) -> None:
        pass
