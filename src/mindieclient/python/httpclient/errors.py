"""The one exception of the client.

It is raised for every error (arguments, network, TLS, the server's answers), so that a caller needs one `except`.
`__cause__` is the original exception.
"""


class MindIEClientException(Exception):
    """What failed, in one sentence."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self._message = message

    def get_message(self) -> str:
        """The sentence."""
        return self._message
