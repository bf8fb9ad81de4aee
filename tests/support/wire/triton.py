"""A server of the Triton routes of spec 3.3.2.4, without a model, on a port of its own."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from kvloom.server.http.slow import GuardedProtocol
from tests.support.asgi import PromptServer, in_thread

MODEL = "llama_65b"


@dataclass
class FakeTriton:
    """Echoes its input. `bodies` are the requests as received; `stopped` the ids that were cancelled."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    stopped: set[str] = field(default_factory=set)
    running: set[str] = field(default_factory=set)
    pieces: list[str] = field(default_factory=lambda: [f" piece{n}" for n in range(12)])

    def app(self) -> Starlette:
        model = f"/v2/models/{MODEL}"
        get = {
            "/v2/health/live": Response(),
            "/v2/health/ready": Response(),
            f"{model}/ready": Response(),
            "/v2": JSONResponse({"name": "MindIE Server", "version": "1", "extensions": {"max_iter_times": 512}}),
            model: JSONResponse({"name": MODEL, "platform": "MindIE Server", "inputs": [], "outputs": []}),
            f"{model}/versions/1": JSONResponse({"name": MODEL, "versions": ["1"]}),
            f"{model}/config": JSONResponse({"model_name": MODEL, "max_seq_len": 2560}),
            f"{model}/getSlotCount": JSONResponse({"total_slots": 50, "free_slots": 50}),
        }
        routes = [Route(path, lambda request, answer=answer: answer) for path, answer in get.items()]
        for name in ("infer", "generate", "generate_stream", "stop_infer"):
            path = name.replace("stop_infer", "stopInfer")
            routes.append(Route(f"{model}/{path}", getattr(self, name), methods=["POST"]))
        return Starlette(routes=routes)

    async def infer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        data = body["inputs"][0]["data"]
        if data[0] == 999:
            return JSONResponse({"error": "token 999 is unknown", "error_type": "validation"}, 422)
        name = body.get("outputs", [{"name": "output0"}])[0]["name"]
        output = {"name": name, "shape": [1, len(data)], "datatype": "UINT32", "data": data[::-1]}
        return JSONResponse({"id": body.get("id"), "outputs": [output]})

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        return JSONResponse({"id": body.get("id"), "model_name": MODEL, "text_output": body["text_input"] + "!"})

    async def generate_stream(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        return StreamingResponse(self._events(body.get("id", "")), media_type="text/event-stream")

    async def _events(self, request_id: str) -> AsyncIterator[bytes]:
        self.running.add(request_id)
        try:
            for text in self.pieces:
                if request_id in self.stopped:
                    return
                event = {"error": "out of luck"} if text == "FAIL" else {"text_output": text}
                yield b"data:" + json.dumps(event).encode() + b"\n\n"
                await asyncio.sleep(0)
            yield b'data:{"text_output":"","details":{"finish_reason":"length"}}\n\n'
        finally:
            self.running.discard(request_id)

    async def stop_infer(self, request: Request) -> Response:
        request_id = (await request.json())["id"]
        if request_id not in self.running and request_id != "1":
            return JSONResponse({"error": f"RequestId is {request_id} not found."}, 404)
        self.stopped.add(request_id)
        return JSONResponse({"id": request_id})


@contextmanager
def serving(app: ASGIApp, **options: Any) -> Iterator[int]:
    """Runs `app` on 127.0.0.1 and a free port, which it yields; `options` are uvicorn's."""
    options = {"http": GuardedProtocol, "log_level": "error", "lifespan": "off"} | options
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        with in_thread(PromptServer(uvicorn.Config(app, **options)), listener):
            yield port
