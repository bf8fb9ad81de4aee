"""Executors hand batches to a runner: in this process here, in rank processes of their own in ranks.py.

Between submit and collect the engine does other work. Batches are run, and collected, in the order of their submission.
"""

from collections import deque
from typing import Protocol

from kvloom.contract.config import EngineConfig
from kvloom.contract.messages import AdapterInfo, Batch, RankInfo, Runner, StepOutput


class RankDied(Exception):
    """The rank process is gone, or takes too long, or its step failed. Nothing that it knew is left."""


class Process(Protocol):
    """Where a model is loaded. Called from the engine's thread only, but for `kill`."""

    info: RankInfo  # of the model as it is loaded now; another one after `restart`

    def load_adapter(self, id: int, path: str) -> AdapterInfo:
        """While no step is under way. Waits until it is loaded; raises BadRequest, RankDied."""
        ...

    def unload_adapter(self, id: int) -> None:
        """Of no sequence in a step that will be submitted. Raises RankDied."""
        ...

    def is_alive(self) -> bool:
        """False when it is known that no later step will work."""
        ...

    def restart(self) -> None:
        """Load the model afresh: sequences, blocks and adapters are forgotten. Raises ModelError, RankDied."""
        ...

    def nudge(self) -> None:
        """From any thread: there is something to take up; who waits long for the model is to look."""

    def kill(self) -> None:
        """From any thread: whoever waits for the model, in `restart` too, hears at once that it died."""

    def close(self) -> None:
        """Free the model's memory. `restart` may follow; safe to call twice."""
        ...


class Executor(Process, Protocol):
    """Runs the engine's batches on one model, one after the other."""

    max_submitted: int  # batches that may be submitted and not collected

    def submit(self, batch: Batch) -> None:
        """Start a step, or line it up behind the one under way, without waiting for it. Raises RankDied."""
        ...

    def collect(self) -> StepOutput:
        """Wait for the oldest step not collected yet. Raises RankDied, also when it takes too long."""
        ...


def max_submitted(config: EngineConfig) -> int:
    """Batches that ranks of this configuration take at once: with 2 the next one is there when the first has ended."""
    return 2 if config.run_ahead else 1


class InProcessExecutor:
    """Runs the batch at once, in the caller's thread: nothing overlaps, so nothing is gained by running ahead."""

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
