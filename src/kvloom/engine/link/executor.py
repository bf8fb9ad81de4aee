"""Executors hand batches to a runner: in this process here, in rank processes of their own in ranks.py.

submit and collect alternate; between them the engine does other work.
"""

from typing import Protocol

from kvloom.contract.messages import AdapterInfo, Batch, RankInfo, Runner, StepOutput


class RankDied(Exception):
    """The rank process is gone, or takes too long, or its step failed. Nothing that it knew is left."""


class Executor(Protocol):
    """Runs the engine's batches on one model, one batch at a time. Called from the engine's thread only."""

    info: RankInfo  # of the model as it is loaded now; another one after `restart`

    @property
    def is_busy(self) -> bool:
        """A batch is submitted and not collected."""

    def submit(self, batch: Batch) -> None:
        """Start a step, without waiting for it. Raises RankDied."""
        ...

    def collect(self) -> StepOutput:
        """Wait for the step that was submitted last, once. Raises RankDied, also when it takes too long."""
        ...

    def load_adapter(self, id: int, path: str) -> AdapterInfo:
        """Between two steps. Waits until it is loaded; raises BadRequest, RankDied."""
        ...

    def unload_adapter(self, id: int) -> None:
        """Between two steps. Raises RankDied."""
        ...

    def is_alive(self) -> bool:
        """False when it is known that no later step will work."""
        ...

    def restart(self) -> None:
        """Load the model afresh: sequences, blocks and adapters are forgotten. Raises ModelError, RankDied."""
        ...

    def kill(self) -> None:
        """From any thread: whoever waits for the model, in `restart` too, hears at once that it died."""

    def close(self) -> None:
        """Free the model's memory. `restart` may follow; safe to call twice."""
        ...


class InProcessExecutor:
    """Runs the batch at once, in the caller's thread."""

    def __init__(self, runner: Runner) -> None:
        self.info = runner.info
        self._runner = runner
        self._output: StepOutput | None = None

    @property
    def is_busy(self) -> bool:
        return self._output is not None

    def submit(self, batch: Batch) -> None:
        self._output = self._runner.run(batch)
        self._runner.prepare_next()

    def collect(self) -> StepOutput:
        output, self._output = self._output, None
        assert output is not None, "collect without submit"
        return output

    def load_adapter(self, id: int, path: str) -> AdapterInfo:
        return self._runner.load_adapter(id, path)

    def unload_adapter(self, id: int) -> None:
        self._runner.unload_adapter(id)

    def is_alive(self) -> bool:
        return True

    def restart(self) -> None:
        raise RankDied("a runner in this process cannot be restarted")

    def kill(self) -> None:
        pass

    def close(self) -> None:
        pass
