"""The control plane, `kvloom pool control`: REST for credentials, tenants and nodes; health and metrics.

Administrators show a bearer token; nodes show one derived from the cluster's secret. Errors are JSON with error_code
and error_msg. Nodes go on with what they know while it is down.
"""

import asyncio
import hmac
import sqlite3
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from kvloom.net.guard import SiteMiddleware
from kvloom.net.sites import Policy, Refusal
from kvloom.pool.auth import RefusedLogins, node_token, problem_of_tenant
from kvloom.pool.config import check_advertised
from kvloom.pool.control.state import ACCESS_ID, Conflict, ControlState, Heartbeat, Missing
from kvloom.pool.metrics import render

_MAX_BODY_BYTES = 1 << 20
_MAX_HEARTBEAT_BYTES = 64 << 20  # a node tells of each of its tenants
_BODY_S = 30.0  # for a body to arrive
_MAX_BYTES = 2**63 - 1  # that the state's file can hold
_MAX_OVERLAP_S = 30 * 86400


class NewCredential(msgspec.Struct, forbid_unknown_fields=True):
    access_id: str
    tenant: str = ""


class Rotation(msgspec.Struct, forbid_unknown_fields=True):
    overlap_s: float = 3600.0


class TenantBody(msgspec.Struct, forbid_unknown_fields=True):
    quota_bytes: int
    guarantee_bytes: int = 0


class Eviction(msgspec.Struct, forbid_unknown_fields=True):
    tenant: str
    bytes: int


class Invalid(Exception):
    """The body or path is wrong; the message names the field."""


_ERRORS: dict[type[Exception], tuple[int, str]] = {
    Invalid: (400, "EMS.0400"),
    msgspec.ValidationError: (400, "EMS.0400"),
    msgspec.DecodeError: (400, "EMS.0400"),
    RecursionError: (400, "EMS.0400"),  # of JSON that is nested too deeply
    Missing: (404, "EMS.0404"),
    Conflict: (409, "EMS.0409"),
    sqlite3.Error: (503, "EMS.0503"),
}
_unkept = RefusedLogins("a change of the state")  # by the disk


def _error(status: int, code: str, message: str) -> Response:
    return JSONResponse({"error_code": code, "error_msg": message}, status)


def _cut_off(status: int, code: str, message: str) -> Response:
    """The answer to a request whose body is not read to its end: the connection cannot be used again."""
    answer = _error(status, code, message)
    answer.headers["connection"] = "close"
    return answer


def _refused(scope: Scope, refused: Refusal) -> Response:
    return _error(refused.status, f"EMS.{refused.status:04d}", refused.text)


_Handler = Callable[[ControlState, Request, bytes], Response]


def _guarded(
    handler: _Handler, state: ControlState, token: str, refused: RefusedLogins, max_bytes: int = _MAX_BODY_BYTES
) -> Callable[[Request], Awaitable[Response]]:
    """Checks the bearer token, the size of the body and that it arrives; turns errors into answers."""

    async def endpoint(request: Request) -> Response:
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        is_known = bool(token) and hmac.compare_digest(shown.encode("latin-1"), token.encode())
        if scheme.lower() != "bearer" or not is_known:
            refused.note(f"{request.method} {request.url.path} from {request.client.host if request.client else '-'}")
            return _error(401, "EMS.0401", "wrong or missing bearer token")
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > max_bytes:
                        return _cut_off(413, "EMS.0413", f"the body exceeds {max_bytes} bytes")
        except (TimeoutError, ClientDisconnect):
            return _cut_off(408, "EMS.0408", f"the body did not arrive in {_BODY_S:g} s")
        except asyncio.CancelledError:  # by the server, a while after it was told to stop
            return _cut_off(503, "EMS.0503", "the control plane is stopping")
        try:
            return await run_in_threadpool(handler, state, request, bytes(body))
        except tuple(_ERRORS) as error:
            status, code = next(found for kind, found in _ERRORS.items() if isinstance(error, kind))
            if not isinstance(error, sqlite3.Error):
                return _error(status, code, str(error))
            _unkept.note(f"{request.method} {request.url.path}, {error}")
            return _error(status, code, f"the control plane cannot keep its --state: {error}")

    return endpoint


def _checked_tenant(name: str) -> str:
    """The name. Raises Invalid."""
    if problem := problem_of_tenant(name):
        raise Invalid(f"tenant: {problem}")
    return name


def _issue(state: ControlState, request: Request, body: bytes) -> Response:
    wanted = msgspec.json.decode(body, type=NewCredential)
    if not ACCESS_ID.fullmatch(wanted.access_id):
        raise Invalid("access_id: must be 1 to 512 characters of 0-9 a-z . - _")
    tenant = _checked_tenant(wanted.tenant or wanted.access_id)
    access_key = state.issue(wanted.access_id, tenant)
    return JSONResponse({"access_id": wanted.access_id, "tenant": tenant, "access_key": access_key}, 201)


def _rotate(state: ControlState, request: Request, body: bytes) -> Response:
    wanted = msgspec.json.decode(body or b"{}", type=Rotation)
    if not 0 <= wanted.overlap_s <= _MAX_OVERLAP_S:
        raise Invalid(f"overlap_s: must be 0 to {_MAX_OVERLAP_S}")
    access_id = request.path_params["access_id"]
    return JSONResponse({"access_id": access_id, "access_key": state.rotate(access_id, wanted.overlap_s)})


def _revoke(state: ControlState, request: Request, body: bytes) -> Response:
    state.revoke(request.path_params["access_id"])
    return Response(status_code=204)


def _credentials(state: ControlState, request: Request, body: bytes) -> Response:
    rows = [(each["access_id"], each["tenant"], len(each["verifiers"])) for each in state.credentials()]
    return JSONResponse({"credentials": [{"access_id": i, "tenant": t, "num_keys": n} for i, t, n in rows]})


def _tenants(state: ControlState, request: Request, body: bytes) -> Response:
    return JSONResponse({"tenants": state.tenants()})


def _tenant(state: ControlState, request: Request, body: bytes) -> Response:
    name = request.path_params["tenant"]
    found = next((each for each in state.tenants() if each["tenant"] == name), None)
    if found is None:
        raise Missing(f"no tenant {name}")
    return JSONResponse(found)


def _set_tenant(state: ControlState, request: Request, body: bytes) -> Response:
    wanted = msgspec.json.decode(body, type=TenantBody)
    if not 0 <= wanted.guarantee_bytes <= wanted.quota_bytes:
        raise Invalid("guarantee_bytes: must be 0 to quota_bytes")
    if wanted.quota_bytes > _MAX_BYTES:
        raise Invalid(f"quota_bytes: must be at most {_MAX_BYTES}")
    state.set_tenant(_checked_tenant(request.path_params["tenant"]), wanted.guarantee_bytes, wanted.quota_bytes)
    return _tenant(state, request, body)


def _nodes(state: ControlState, request: Request, body: bytes) -> Response:
    return Response(msgspec.json.encode({"nodes": state.nodes()}), media_type="application/json")


def _heartbeat(state: ControlState, request: Request, body: bytes) -> Response:
    beat = msgspec.json.decode(body, type=Heartbeat)
    if beat.address:
        try:
            check_advertised(beat.address)
        except ValueError as error:
            raise Invalid(f"address: {error}") from None
    orders = state.heartbeat(request.path_params["node_id"], beat)
    return Response(msgspec.json.encode(orders), media_type="application/json")


def _drain(is_draining: bool, state: ControlState, request: Request, body: bytes) -> Response:
    state.drain(request.path_params["node_id"], is_draining)
    return JSONResponse({"node_id": request.path_params["node_id"], "is_draining": is_draining})


def _remove_node(state: ControlState, request: Request, body: bytes) -> Response:
    state.remove_node(request.path_params["node_id"])
    return Response(status_code=204)


def _evict(state: ControlState, request: Request, body: bytes) -> Response:
    wanted = msgspec.json.decode(body, type=Eviction)
    if not 0 < wanted.bytes <= _MAX_BYTES:
        raise Invalid(f"bytes: must be 1 to {_MAX_BYTES}")
    state.evict(request.path_params["node_id"], _checked_tenant(wanted.tenant), wanted.bytes)
    return JSONResponse({"tenant": wanted.tenant, "bytes": wanted.bytes}, 202)


def build_app(state: ControlState, admin_token: str, secret: bytes, hosts: frozenset[str] = frozenset()) -> Starlette:
    """The control plane's web application; `hosts`: names it may be asked under by who shows no token."""

    async def healthz(_request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(_request: Request) -> Response:
        nodes = await run_in_threadpool(state.nodes)
        text = render((node["stats"] for node in nodes if node["is_alive"]), refused.count)
        return Response(text, media_type="text/plain; version=0.0.4")

    refused = RefusedLogins("a call of the control plane without its token")

    def guarded(handler: _Handler) -> Callable[[Request], Awaitable[Response]]:
        return _guarded(handler, state, admin_token, refused)

    heartbeat = _guarded(_heartbeat, state, node_token(secret), refused, _MAX_HEARTBEAT_BYTES)

    routes: list[tuple[str, str, _Handler]] = [
        ("POST", "/v1/credentials", _issue),
        ("GET", "/v1/credentials", _credentials),
        ("POST", "/v1/credentials/{access_id}:rotate", _rotate),
        ("DELETE", "/v1/credentials/{access_id}", _revoke),
        ("GET", "/v1/tenants", _tenants),
        ("GET", "/v1/tenants/{tenant}", _tenant),
        ("PUT", "/v1/tenants/{tenant}", _set_tenant),
        ("GET", "/v1/nodes", _nodes),
        ("POST", "/v1/nodes/{node_id}:drain", partial(_drain, True)),
        ("POST", "/v1/nodes/{node_id}:undrain", partial(_drain, False)),
        ("DELETE", "/v1/nodes/{node_id}", _remove_node),
        ("POST", "/v1/nodes/{node_id}/blocks:evict", _evict),
    ]
    return Starlette(
        middleware=[Middleware(SiteMiddleware, Policy(hosts, has_keys=True), _refused)],
        routes=[
            Route("/healthz", healthz),
            Route("/metrics", metrics),
            Route("/v1/nodes/{node_id}:heartbeat", heartbeat, methods=["POST"]),
            *(Route(path, guarded(handler), methods=[method]) for method, path, handler in routes),
        ],
    )
