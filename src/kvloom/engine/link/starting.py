"""What all starts of processes with a model share: how a failed one is cleaned up and reported."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvloom.contract.errors import ModelError
from kvloom.engine.link.executor import RankDied

# what the system says that has no processes, memory or descriptors left
_REFUSED = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


@contextmanager
def starting(model: str, exit_reason: Callable[[], str], close: Callable[[], None]) -> Iterator[None]:
    """A context around the first messages to and from new processes: on any failure they are closed.

    Raises ModelError, with the reason, when one of them has died.
    """
    try:
        yield
    except (RankDied, OSError, EOFError) as error:
        reason = _reason(error) or exit_reason()
        close()
        raise ModelError(f"loading {model or 'the model'} failed: {reason}") from error
    except BaseException:
        close()
        raise


def _reason(error: Exception) -> str:
    """Why processes do not start, if it is not that one of them has ended; else ""."""
    if isinstance(error, RankDied):
        return str(error)
    if isinstance(error, OSError) and error.errno in _REFUSED:
        return f"the system has no room for its process: {error.strerror}"
    return ""


def ended(code: int | None) -> str:
    """How a process with this exit code ended, for people; None = it still runs but does not answer."""
    if code is None:
        return "the model process closed its connection"
    return f"the model process was killed by signal {-code}" if code < 0 else f"the model process exited with {code}"
