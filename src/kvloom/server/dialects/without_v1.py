"""The OpenAI routes without /v1, as llama.cpp's server has them: for programs whose base URL lacks it."""

from collections.abc import Sequence
from dataclasses import replace

from kvloom.contract.errors import ServingError
from kvloom.server.errors import ErrorReply
from kvloom.server.http.reply import Dialect, Endpoint

_PREFIX = "/v1"


class WithoutV1:
    """The same endpoints as `dialect`. Last in the list of dialects: a route that another has is the other's."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        found = [endpoint for endpoint in self._dialect.endpoints if endpoint.path.startswith(_PREFIX + "/")]
        return [replace(endpoint, path=endpoint.path.removeprefix(_PREFIX)) for endpoint in found]

    def error_reply(self, error: ServingError) -> ErrorReply:
        return self._dialect.error_reply(error)
