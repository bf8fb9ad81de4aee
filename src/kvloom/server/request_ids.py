"""The id of a request: in its answer's X-Request-Id, in its lines of the log, and of what it generates."""

import re
import uuid

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

HEADER = "X-Request-Id"
_ID = re.compile(r"[\w.:-]{1,128}\Z")
_ANTHROPICS = "/v1/messages"  # routes whose clients read it as request-id
_KEY = "kvloom.request_id"  # in an ASGI scope


def request_id_of(scope: Scope) -> str:
    """The caller's X-Request-Id, or a new one where there is none or an odd one; the same each time."""
    if _KEY not in scope:
        given = Headers(scope=scope).get(HEADER, "")
        scope[_KEY] = given if _ID.match(given) else uuid.uuid4().hex
    return str(scope[_KEY])


def with_id(scope: Scope, response: Response) -> Response:
    """The response, with the id of its request in its head."""
    response.headers[HEADER] = request_id_of(scope)
    if scope["path"].startswith(_ANTHROPICS):
        response.headers["request-id"] = request_id_of(scope)
    return response
