"""Who may ask: API keys, and the rule about listening on every address.

Keys are kept as salted SHA-256, not scrypt: a key has at least 128 random bits, so there is no dictionary to try, and a
slow hash a request would be a way to keep the server busy. Keys that people invent are refused for being short.
"""

import hashlib
import hmac
import ipaddress
import json
import secrets
from collections.abc import Collection, Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvloom.engine.errors import UserError
from kvloom.server.errors import family_of

MIN_KEY_CHARS = 24
MAX_KEY_CHARS = 512
SALT_BYTES = 16
TENANT = "kvloom.tenant"  # in an ASGI scope
_SCHEME = "sha256"


class AccessError(UserError):
    """The configuration would open the server wider than it says. Never holds a key."""


def new_key() -> str:
    return f"kvl-{secrets.token_urlsafe(32)}"


def hash_key(key: str) -> str:
    """What the configuration holds of a key: `sha256$salt$digest`."""
    if not MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
        raise AccessError(f"an API key must be {MIN_KEY_CHARS} to {MAX_KEY_CHARS} printable ASCII characters, no space")
    salt = secrets.token_bytes(SALT_BYTES)
    return f"{_SCHEME}${salt.hex()}${_digest(salt, key).hex()}"


def read_hashes(path: Path) -> tuple[str, ...]:
    """Hashes from a file, one a line; empty lines and those that begin with # are skipped. Raises AccessError."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise AccessError(f"{path} cannot be read: {error}") from error
    hashes = tuple(line for line in lines if line and not line.startswith("#"))
    if not hashes:
        raise AccessError(f"{path} holds no hash of an API key; make one with: kvloom api-key")
    return hashes


class KeyRing:
    def __init__(self, hashes: Sequence[str]) -> None:
        if not hashes:
            raise AccessError("API keys are required, but none is configured")
        self._entries = [_parsed(position, text) for position, text in enumerate(hashes)]

    def tenant_of(self, key: str) -> str | None:
        """A name for whoever holds this key, None for a wrong one. The name is the same as long as its hash is kept.

        Compares with every key, always: the time tells neither which one fits nor how nearly.
        """
        found = None
        for salt, digest in self._entries:
            if hmac.compare_digest(_digest(salt, key), digest):
                found = digest.hex()[:16]
        return found


class ApiKeyMiddleware:
    """ASGI: 401 without a valid `Authorization: Bearer KEY` or `X-Api-Key: KEY`, except on `open_paths` (exact).

    The key's tenant is left in the scope under TENANT.
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
            await _unauthorized(scope["path"])(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["path"] in self._open_paths:
            return True
        headers = Headers(scope=scope)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        tenant = self._keys.tenant_of(key) if 0 < len(key) <= MAX_KEY_CHARS else None
        scope[TENANT] = tenant or ""
        return tenant is not None


def check_bind(address: str, is_all_allowed: bool) -> None:
    """`address` as configured; 0.0.0.0 and :: listen on every network and must be allowed by name."""
    try:
        is_all = ipaddress.ip_address(address).is_unspecified
    except ValueError as error:
        raise AccessError(f"ipAddress must be an IP address: {address!r}") from error
    if is_all and not is_all_allowed:
        raise AccessError(
            f"ipAddress {address} listens on every network of this machine; "
            "give one address, or set allowAllZeroIpListening to true if that is wanted"
        )


def _unauthorized(path: str) -> Response:
    text = "a valid API key is needed: Authorization: Bearer KEY, or X-Api-Key: KEY"
    body: dict[str, object] = {"error": text, "error_type": "authentication"}
    family = family_of(path)
    if family == "anthropic":
        body = {"type": "error", "error": {"type": "authentication_error", "message": text}}
    elif family == "openai":
        body = {
            "error": {"message": text, "type": "authentication_error", "param": None, "code": "invalid_api_key"},
        }
    headers = {"WWW-Authenticate": "Bearer"}
    return Response(json.dumps(body), 401, headers, media_type="application/json")


def _digest(salt: bytes, key: str) -> bytes:
    return hashlib.sha256(salt + key.encode()).digest()


def _parsed(position: int, text: str) -> tuple[bytes, bytes]:
    try:
        scheme, salt, digest = text.split("$")
        if scheme != _SCHEME or len(bytes.fromhex(digest)) != hashlib.sha256().digest_size:
            raise ValueError(scheme)
        return bytes.fromhex(salt), bytes.fromhex(digest)
    except ValueError as error:
        raise AccessError(f"API key {position} is not a hash made by hash_key") from error
