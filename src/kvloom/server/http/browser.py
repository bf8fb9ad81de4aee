"""GET / in a browser redirects to the console; other clients get the route's own answer."""

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

PAGE = "console"  # relative, so that it works behind a proxy's prefix


class BrowserMiddleware:
    """ASGI: redirects a GET of / that accepts HTML. Comes before the API keys, because browsers cannot send one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_root = scope["type"] == "http" and scope["path"] == "/" and scope["method"] == "GET"
        if is_root and "text/html" in Headers(scope=scope).get("accept", "").lower():
            headers = {"Vary": "Accept", "Cache-Control": "no-store"}
            await RedirectResponse(PAGE, 303, headers)(scope, receive, send)
        else:
            await self._app(scope, receive, send)
