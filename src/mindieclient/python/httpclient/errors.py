"""The one exception of the client.

Whatever goes wrong (an argument, the network, TLS, an answer of the server) is told by it, so that a caller needs one
`except`. `__cause__` keeps the exception it came from.
"""


class MindIEClientException(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self._message = message

    def get_message(self) -> str:
        return self._message
