"""The order of checks before the routes, for every server: requests from other sites' pages, CORS, then API keys."""

from itertools import filterfalse

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from kvloom.contract.errors import ServingError
from kvloom.net.guard import SiteMiddleware
from kvloom.net.listening import is_address, own_names
from kvloom.net.sites import Policy, Refusal
from kvloom.server.config.settings import ServerConfig
from kvloom.server.dialects.operators.console import OPEN_PATHS as CONSOLE_PATHS
from kvloom.server.errors import Forbidden, Misdirected, WrongMediaType, reply_for_path
from kvloom.server.http.browser import BrowserMiddleware
from kvloom.server.request_ids import with_id
from kvloom.server.secure.api_keys import KeyRing
from kvloom.server.secure.key_guard import ApiKeyMiddleware

# paths answered without an API key
_HEALTH_PATHS = ("/health", "/healthz", "/livez", "/readyz", "/ping", "/v2/health/live", "/v2/health/ready")
OPEN_PATHS = (*_HEALTH_PATHS, "/openapi.json", "/docs", *CONSOLE_PATHS)
_PAGES = frozenset({"/", "/console", "/docs"})  # pages for people, which links of other sites may lead to
_CURL_PATHS = ("/api/",)  # Ollama's
_ERRORS: dict[int, type[ServingError]] = {403: Forbidden, 415: WrongMediaType, 421: Misdirected}


def policy_of(config: ServerConfig) -> Policy:
    """Which pages may send requests to a server of this configuration, under which names."""
    listened = [host.lower() for host, _ in config.addresses.values()]
    hosts = config.allowed_hosts | own_names(listened) | frozenset(filterfalse(is_address, listened))
    return Policy(hosts, config.cors_origins, _PAGES, _CURL_PATHS, has_keys=bool(config.api_key_hashes))


def guard(app: ASGIApp, policy: Policy, keys: KeyRing | None) -> ASGIApp:
    """The app behind all checks. Preflights carry no key, so CORS comes before the keys."""
    if keys is not None:
        app = ApiKeyMiddleware(app, keys, open_paths=OPEN_PATHS)
    if policy.origins:
        methods = ["GET", "POST", "DELETE"]
        app = CORSMiddleware(app, sorted(policy.origins), allow_methods=methods, allow_headers=["*"])
    return SiteMiddleware(BrowserMiddleware(app), policy, _reply)


def _reply(scope: Scope, refused: Refusal) -> Response:
    reply = reply_for_path(scope["path"], _ERRORS[refused.status](refused.text))
    return with_id(scope, Response(reply.body, reply.status, reply.headers, media_type="application/json"))
