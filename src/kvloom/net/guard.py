"""SiteMiddleware: applies the checks of sites.py before an ASGI app."""

from collections.abc import Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvloom.net.sites import Policy, Refusal, joined, refusal


class SiteMiddleware:
    """Answers refused requests with `reply(scope, refusal)`; comes before everything that a request may change."""

    def __init__(self, app: ASGIApp, policy: Policy, reply: Callable[[Scope, Refusal], Response]) -> None:
        self._app, self._policy, self._reply = app, policy, reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            pairs = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
            refused = refusal(self._policy, scope["method"], scope["path"], joined(pairs))
            if refused is not None:
                await self._reply(scope, refused)(scope, receive, send)
                return
        await self._app(scope, receive, send)
