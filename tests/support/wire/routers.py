"""Third-party routers as installed, before servers that record their requests."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.support.ports import free_port
from tests.support.waiting import until

SGLANG, VLLM = "sglang_router.launch_router", "vllm_router.launch_router"


@dataclass(slots=True)
class Recorder:
    """The requests to a server: (method, path, status) in order of the answers."""

    asked: list[tuple[str, str, int]] = field(default_factory=list)

    def paths(self, method: str) -> list[str]:
        return [path for asked, path, _ in self.asked if asked == method]

    def wrap(self, app: ASGIApp) -> ASGIApp:
        async def recording(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)

            async def noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self.asked.append((scope["method"], scope["path"], message["status"]))
                await send(message)

            return await app(scope, receive, noted)

        return recording


@contextmanager
def router(module: str, *arguments: str) -> Iterator[httpx.Client]:
    """A client of a router that is ready; its output is shown if it does not become ready."""
    port = free_port()
    where = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()))
    quick = ("--worker-startup-check-interval", "1", "--health-check-interval-secs", "1", "--log-level", "info")
    command = [sys.executable, "-m", module, *where, *quick, *arguments]
    with tempfile.TemporaryFile("w+") as output:  # a pipe would fill up
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
                until(lambda: _is_ready(client) or process.poll() is not None)
                if process.poll() is not None:
                    output.seek(0)
                    raise AssertionError(output.read())
                yield client
        finally:
            process.kill()
            process.wait()


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readiness").status_code == 200
    except httpx.HTTPError:
        return False


def text_of(events: str) -> dict[int, str]:
    """The texts of a streamed chat or completion, each with its finish reason; their parts come in any order."""
    texts: dict[int, str] = {}
    for line in events.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                text = choice.get("text") or choice.get("delta", {}).get("content") or ""
                end = f" [{choice['finish_reason']}]" if choice["finish_reason"] else ""
                texts[choice["index"]] = texts.get(choice["index"], "") + text + end
    return texts
