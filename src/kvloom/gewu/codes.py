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


class Refused(Exception):
    """A call is answered with `code`; the message is for logs and for the Python binding."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
