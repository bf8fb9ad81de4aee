"""The Triton dialect: Open Inference Protocol (KServe v2) over HTTP, generate extension, the seed's slots and stop."""

import re
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from kvloom.engine.errors import BadRequest, NotFound, Overloaded, ServingError
from kvloom.engine.request import FinishReason
from kvloom.server.api import triton_models
from kvloom.server.api.parameters import TRITON, Parameters, finish_name, generation_of, invalid, prompt_of
from kvloom.server.api.triton_bodies import (
    JSON_LENGTH_HEADER,
    Infer,
    InferBody,
    StopBody,
    TextInputBody,
    generate_decoder,
    infer_answer,
    stop_decoder,
)
from kvloom.server.body import decode_body
from kvloom.server.errors import ErrorReply, tgi_error, tgi_reply
from kvloom.server.generation import Generation, GenerationService
from kvloom.server.health import Health
from kvloom.server.models import Models
from kvloom.server.reply import Call, Endpoint, Events, Reply
from kvloom.server.timing import Timing

MEDIA_TYPE = "text/event-stream; charset=utf-8"
BINARY = "application/octet-stream"
VERSION = "1"  # the only one a model has
_ID = re.compile(r"[a-zA-Z0-9_-]{1,256}\Z")


class Triton:
    def __init__(
        self,
        models: Models,
        health: Health,
        version: str = "",
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self._models, self._health = models, health
        self._version, self._new_id = version, new_id

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Each model route also under /versions/{version}."""
        model, versioned = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"

        def get(path: str, answer: Callable[[Call], Awaitable[Reply]], summary: str) -> list[Endpoint]:
            return [Endpoint("GET", base + path, answer, summary, is_management=True) for base in (versioned, model)]

        def post(path: str, answer: Callable[[Call], Awaitable[Reply]], summary: str, body: type) -> list[Endpoint]:
            streams = path.endswith("stream")
            return [
                Endpoint("POST", base + path, answer, summary, (body,), path != "/stopInfer", is_streaming=streams)
                for base in (versioned, model)
            ]

        return (
            Endpoint("GET", "/v2", self.server, "Server metadata", is_management=True),
            Endpoint("GET", "/v2/health/live", self.live, "200 while the server runs", is_management=True),
            Endpoint("GET", "/v2/health/ready", self.ready, "200 while requests are accepted", is_management=True),
            *get("/ready", self.model_ready, "200 while the model answers"),
            *get("/config", self.config, "The model's configuration"),
            *get("/getSlotCount", self.slots, "Places of the running batch"),
            *get("", self.model, "The model's metadata"),
            *post("/infer", self.infer, "Tokens to tokens, JSON or binary tensors", InferBody),
            *post("/generate", self.generate, "Text to text", TextInputBody),
            *post("/generate_stream", self.generate_stream, "Text to text, streamed", TextInputBody),
            *post("/stopInfer", self.stop, "End a request with what it has", StopBody),
        )

    def error_reply(self, error: ServingError) -> ErrorReply:
        return tgi_reply(error)

    # -- health and metadata

    async def live(self, call: Call) -> Reply:
        """Raises Unavailable."""
        self._health.check_live()
        return Reply(b'{"live":true}' if self._is_oip(call) else b"")

    async def ready(self, call: Call) -> Reply:
        """503 also while the queue is full, so that a balancer turns elsewhere."""
        try:
            self._health.check_ready()
        except Overloaded as error:
            return Reply(msgspec.json.encode({"message": str(error)}), status=503, headers={"Retry-After": "1"})
        return Reply(b'{"ready":true}' if self._is_oip(call) else b"")

    def _is_oip(self, call: Call) -> bool:
        return self._models.options.has_oip_health or "oip" in call.headers.get("accept", "")

    async def model_ready(self, call: Call) -> Reply:
        """Raises NotFound, Unavailable."""
        service = self._service(call)
        self._health.check_live()
        service.check_ready()
        name = msgspec.json.encode({"name": service.name, "ready": True})
        return Reply(name if self._is_oip(call) else b"")

    async def server(self, call: Call) -> Reply:
        is_oip = call.query.get("format") == "oip"
        card = self._models.default.card
        return Reply(msgspec.json.encode(triton_models.server_metadata(card, self._version, is_oip)))

    async def model(self, call: Call) -> Reply:
        """Raises NotFound."""
        return Reply(msgspec.json.encode(triton_models.model_metadata(self._service(call), VERSION)))

    async def config(self, call: Call) -> Reply:
        """Raises NotFound."""
        return Reply(msgspec.json.encode(triton_models.model_config(self._service(call))))

    async def slots(self, call: Call) -> Reply:
        """Raises NotFound. Counts of the last step."""
        return Reply(msgspec.json.encode(triton_models.slot_count(self._service(call))))

    def _service(self, call: Call) -> GenerationService:
        version = call.path.get("version", VERSION)
        if version != VERSION:
            raise NotFound(f"the model {call.path['model']!r} has no version {version!r}; there is {VERSION}")
        return self._models.get(call.path["model"])

    # -- inference

    async def infer(self, call: Call) -> Reply:
        """Raises ServingError before anything is answered."""
        service = self._service(call)
        request = Infer(call.body, call.headers.get(JSON_LENGTH_HEADER))
        if not request.ids:
            raise invalid("`inputs` cannot be empty")
        id = request.id or call.headers["x-request-id"]
        generation = _generation(service, id, request.ids, request.parameters, call.tenant)
        [answer] = await service.collect(generation)
        head: dict[str, Any] = {"id": request.id, "model_name": service.name, "model_version": call.path.get("version")}
        ids = [*answer.prompt_ids, *answer.token_ids] if self._models.options.is_input_echoed else answer.token_ids
        body, headers = infer_answer(head, request.output_name, ids, request.is_binary_wanted)
        return Reply(body, media_type=BINARY if request.is_binary_wanted else "application/json", headers=headers)

    async def generate(self, call: Call) -> Reply:
        """Raises ServingError."""
        service = self._service(call)
        body = decode_body(generate_decoder, call.body)
        generation = self._text_generation(service, body, call)
        [answer] = await service.collect(generation)
        head = _head(generation, service, call)
        reply: dict[str, Any] = {**head, "text_output": answer.text}
        if body.parameters and body.parameters.details:
            count = len(answer.token_ids)
            reply["details"] = _details(service, answer.timing, count, answer.finish_reason)
        return Reply(msgspec.json.encode(reply))

    async def generate_stream(self, call: Call) -> Reply:
        """Raises ServingError before anything is answered."""
        service = self._service(call)
        body = decode_body(generate_decoder, call.body)
        generation = self._text_generation(service, body, call)
        has_details = bool(body.parameters and body.parameters.details)
        events = self._events(service, generation, _head(generation, service, call), has_details)
        return Reply(media_type=MEDIA_TYPE, events=await Events.begin(events, _error_event))

    async def _events(
        self, service: GenerationService, generation: Generation, head: dict[str, Any], has_details: bool
    ) -> AsyncGenerator[bytes]:
        timing, num_tokens = Timing(), 0
        async with aclosing(service.stream(generation, timing)) as deltas:
            async for _, delta in deltas:
                num_tokens += len(delta.token_ids)
                item = {**head, "text_output": delta.text}
                if has_details:
                    item["details"] = _details(service, timing, num_tokens, delta.finish_reason)
                yield _event(item)

    def _text_generation(self, service: GenerationService, body: TextInputBody, call: Call) -> Generation:
        if body.id is not None and not body.id:
            raise invalid("`id` cannot be empty")
        ids = prompt_of(service, body.text_input, self._models.options.max_input_chars, "text_input")
        id, params = body.id or self._new_id(), body.parameters or Parameters()
        return _generation(service, id, ids, params, call.tenant, "text_input")

    async def stop(self, call: Call) -> Reply:
        """Ends every running request of this id. Raises NotFound, BadRequest."""
        service = self._service(call)
        body = decode_body(stop_decoder, call.body)
        if not _ID.match(body.id):
            raise BadRequest("id", "must be 1 to 256 letters, digits, - or _")
        if not service.stop(body.id):
            raise NotFound(f"RequestId is {body.id} not found.")
        return Reply(call.body)


def _generation(
    service: GenerationService, id: str, ids: tuple[int, ...], params: Parameters, tenant: str, name: str = "inputs"
) -> Generation:
    if (params.best_of or 1) > 1:
        raise invalid("`best_of` != 1 is not allowed for this endpoint")
    return generation_of(service, id, ids, params, TRITON, name=name, tenant=tenant)


def _head(generation: Generation, service: GenerationService, call: Call) -> dict[str, Any]:
    return {"id": generation.id, "model_name": service.name, "model_version": call.path.get("version")}


def _details(
    service: GenerationService, timing: Timing, num_tokens: int, finish_reason: FinishReason | None
) -> dict[str, Any]:
    """Times in ms; batch_size is that of the last step."""
    first_s = timing.first_token_s
    details: dict[str, Any] = {} if finish_reason is None else {"finish_reason": finish_name(finish_reason)}
    return {
        **details,
        "generated_tokens": num_tokens,
        "first_token_cost": None if first_s is None else round(first_s * 1e3, 3),
        "decode_cost": None if num_tokens < 2 else round(timing.decode_s * 1e3, 3),
        "batch_size": max(1, service.engine.stats().num_running),
        "queue_wait_time": round(timing.queue_s * 1e3, 3),
    }


def _event(item: dict[str, Any]) -> bytes:
    """Without a space after the colon: clients of this dialect look for `data:{`."""
    return b"data:" + msgspec.json.encode(item) + b"\n\n"


def _error_event(error: ServingError) -> bytes:
    return _event(tgi_error(error))
