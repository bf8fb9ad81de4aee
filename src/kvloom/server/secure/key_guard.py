"""Requires an API key."""

import json
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvloom.server.errors import family_of
from kvloom.server.request_ids import with_id
from kvloom.server.secure.api_keys import MAX_KEY_CHARS, KeyRing

TENANT = "kvloom.tenant"  # in an ASGI scope


class ApiKeyMiddleware:
    """ASGI: 401 without a valid `Authorization: Bearer KEY` or `X-Api-Key: KEY`, except on `open_paths` (exact).

    Puts the key's tenant into the scope under TENANT.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, open_paths: Collection[str] = ()) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await with_id(scope, _unauthorized(scope["path"]))(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["path"] in self._open_paths:
            return True
        headers = Headers(scope=scope)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        tenant = self._keys.tenant_of(key) if 0 < len(key) <= MAX_KEY_CHARS else None
        scope[TENANT] = tenant or ""
        return tenant is not None


def _unauthorized(path: str) -> Response:
    text = "a valid API key is needed: Authorization: Bearer KEY, or X-Api-Key: KEY"
    body: dict[str, object] = {"error": text, "error_type": "authentication"}
    family = family_of(path)
    if family == "anthropic":
        body = {"type": "error", "error": {"type": "authentication_error", "message": text}}
    elif family == "ollama":
        body = {"error": text}
    elif family == "openai":
        body = {
            "error": {"message": text, "type": "authentication_error", "param": None, "code": "invalid_api_key"},
        }
    headers = {"WWW-Authenticate": "Bearer"}
    return Response(json.dumps(body), 401, headers, media_type="application/json")
