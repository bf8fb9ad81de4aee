"""How programs tell the mistakes of who started them."""

import errno
import os

from kvloom.contract.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a write says so without the file's name


def problem_of(error: Exception) -> str | None:
    """What a person can put right, in one sentence; None = the mistake is ours."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.strerror is not None:
        if isinstance(error.filename, str | bytes):
            return f"{os.fsdecode(error.filename)}: {error.strerror}"
        return error.strerror if error.errno in _FULL else None
    return None
