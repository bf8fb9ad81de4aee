"""GET / for people: a browser is sent to the console; whoever else asks gets what the route answers."""

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

PAGE = "console"  # relative, so that it is right behind a proxy's prefix too


class BrowserMiddleware:
    """ASGI: a GET of / that accepts HTML is redirected. It stands before the API keys: browsers cannot send one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_root = scope["type"] == "http" and scope["path"] == "/" and scope["method"] == "GET"
        if is_root and "text/html" in Headers(scope=scope).get("accept", "").lower():
            headers = {"Vary": "Accept", "Cache-Control": "no-store"}
            await RedirectResponse(PAGE, 303, headers)(scope, receive, send)
        else:
            await self._app(scope, receive, send)
