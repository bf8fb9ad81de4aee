"""How programs report errors of their users."""

import errno
import os

from kvloom.contract.errors import UserError

# raised without a file's name: a write for which there is no room, a descriptor that the system has not
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE)


def reason_of(error: Exception) -> str:
    """Why a file could not be used, without the number and the path that str() of an OSError has."""
    return getattr(error, "strerror", None) or str(error)


def problem_of(error: Exception) -> str | None:
    """One sentence about an error that the user can correct; None = the error is a bug of ours."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.strerror is not None:
        if isinstance(error.filename, str | bytes):
            return f"{os.fsdecode(error.filename)}: {error.strerror}"
        return error.strerror if error.errno in _FULL else None
    return None
