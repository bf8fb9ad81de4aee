"""Error codes of the ABI (qos/qos.h), and the exception that carries one."""

from enum import IntEnum


class Code(IntEnum):
    OK = 0
    NOPERM = 201
    NOMEM = 203
    INVAL = 401
    EXIST = 501
    NOENT = 502
    NOSYS = 801
    FAULT = 901


_MAX_CHARS = 8192  # of a message: twice the longest path


def shown(text: str) -> str:
    """The text as a message carries it: its beginning, with escapes for bytes of a path that are not UTF-8."""
    return text[:_MAX_CHARS].encode(errors="backslashreplace").decode()


class Refused(Exception):
    """A call is answered with `code`; the message is for logs and for the Python binding."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(shown(message))
        self.code = code
