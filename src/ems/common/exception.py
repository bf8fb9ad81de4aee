"""The one exception a caller of the SDK sees, and its codes (spec ems 9).

EMS_INVALID_ARGUMENT   the call is wrong; its message begins with the name of the argument
EMS_IO_ERROR           the agent is gone, refuses the credentials, or the connection broke
EMS_IO_TIMEOUT         nothing could be decided before the deadline of the option
EMS_INTERNAL_ERROR     a fault of the SDK or of the device memory

Misses, evicted or damaged blocks and a full pool are answers (`CcResult`), never exceptions.
"""

from enum import IntEnum


class EmsErrorCode(IntEnum):
    """Codes returned by `EmsException.status_code()`. The numbers are ours: the specification gives names only."""

    EMS_OK = 0
    EMS_INVALID_ARGUMENT = 1
    EMS_IO_ERROR = 2
    EMS_IO_TIMEOUT = 3
    EMS_INTERNAL_ERROR = 4


class EmsException(Exception):
    """An error of a given kind; `message()` is for people."""

    def __init__(self, code: EmsErrorCode, message: str) -> None:
        super().__init__(code, message)
        self._code = code
        self._message = message

    def status_code(self) -> EmsErrorCode:
        """Which kind of error this is (spec ems 9.1)."""
        return self._code

    def message(self) -> str:
        """What went wrong, in words (spec ems 9.2)."""
        return self._message

    def __str__(self) -> str:
        return f"[{self._code.name}] {self._message}"


def invalid_argument(name: str, problem: str) -> EmsException:
    """The exception for a wrong argument: its message starts with the argument's name."""
    return EmsException(EmsErrorCode.EMS_INVALID_ARGUMENT, f"{name}: {problem}")


def io_error(message: str) -> EmsException:
    """The exception for a pool that is gone or refuses us."""
    return EmsException(EmsErrorCode.EMS_IO_ERROR, message)


def io_timeout(message: str) -> EmsException:
    """The exception for a deadline that passed with nothing decided."""
    return EmsException(EmsErrorCode.EMS_IO_TIMEOUT, message)


def internal_error(message: str) -> EmsException:
    """The exception for a fault of the SDK itself or of device memory."""
    return EmsException(EmsErrorCode.EMS_INTERNAL_ERROR, message)
