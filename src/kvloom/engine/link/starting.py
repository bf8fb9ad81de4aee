"""What all starts of processes with a model share: how a failed one is cleaned up and reported."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvloom.contract.errors import ModelError
from kvloom.engine.link.executor import RankDied


@contextmanager
def starting(model: str, exit_reason: Callable[[], str], close: Callable[[], None]) -> Iterator[None]:
    """A context around the first messages to and from new processes: on any failure they are closed.

    Raises ModelError, with the reason, when one of them has died.
    """
    try:
        yield
    except (RankDied, OSError, EOFError) as error:
        reason = str(error) if isinstance(error, RankDied) else exit_reason()
        close()
        raise ModelError(f"loading {model or 'the model'} failed: {reason}") from error
    except BaseException:
        close()
        raise


def ended(code: int | None) -> str:
    """How a process with this exit code ended, for people; None = it still runs but does not answer."""
    if code is None:
        return "the model process closed its connection"
    return f"the model process was killed by signal {-code}" if code < 0 else f"the model process exited with {code}"
