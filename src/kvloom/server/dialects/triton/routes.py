"""The Triton dialect: Open Inference Protocol (KServe v2), generate extension, slots, stop (spec 3.3.2.4, 3.3.2.5)."""

import re
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec

from kvloom.contract.errors import BadRequest, NotFound, Overloaded, ServingError
from kvloom.server.dialects.ids import new_id
from kvloom.server.dialects.parameters import (
    TRITON,
    Parameters,
    Question,
    generation_of,
    invalid,
    prompt_of,
)
from kvloom.server.dialects.triton import models as triton_models
from kvloom.server.dialects.triton.bodies import (
    JSON_LENGTH_HEADER,
    Infer,
    InferBody,
    StopBody,
    TextInputBody,
    generate_decoder,
    stop_decoder,
)
from kvloom.server.dialects.triton.names import MODEL_PATH
from kvloom.server.dialects.triton.writers import InferWriter, TextWriter
from kvloom.server.errors import ErrorReply, tgi_reply
from kvloom.server.http.body import decode_body
from kvloom.server.http.job import Job
from kvloom.server.http.reply import Endpoint, HttpRequest, Reply
from kvloom.server.observe.timing import Timing
from kvloom.server.serving.health import Health
from kvloom.server.serving.registry import Models
from kvloom.server.serving.service import GenerationService

MEDIA_TYPE = "text/event-stream; charset=utf-8"
VERSION = "1"  # the only one a model has
_ID = re.compile(r"[a-zA-Z0-9_-]{1,256}\Z")


class _Stop(NamedTuple):
    service: GenerationService
    id: str
    body: bytes


class Triton:
    def __init__(self, models: Models, health: Health, version: str = "") -> None:
        self._models, self._health, self._version = models, health, version

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Each model route also under /versions/{version}."""
        model, versioned = MODEL_PATH, f"{MODEL_PATH}/versions/{{version}}"

        def get(path: str, answer: Callable[[HttpRequest], Awaitable[Reply]], summary: str) -> list[Endpoint]:
            return [Endpoint("GET", base + path, answer, summary, is_management=True) for base in (versioned, model)]

        def post(path: str, parse: Callable[[HttpRequest], Any], summary: str, body: type) -> list[Endpoint]:
            streams, runs = path.endswith("stream"), path != "/stopInfer"
            answer = None if runs else self.stop
            return [
                Endpoint("POST", base + path, answer, summary, (body,), runs, is_streaming=streams, parse=parse)
                for base in (versioned, model)
            ]

        return (
            Endpoint("GET", "/v2", self.server, "Server metadata", is_management=True),
            Endpoint(
                "GET", "/v2/health/live", self.live, "200 while the server runs", is_management=True, is_early=True
            ),
            Endpoint("GET", "/v2/health/ready", self.ready, "200 while requests are accepted", is_management=True),
            *get("/ready", self.model_ready, "200 while the model answers"),
            *get("/config", self.config, "The model's configuration"),
            *get("/getSlotCount", self.slots, "Slots of the running batch"),
            *get("", self.model, "The model's metadata"),
            *post("/infer", self.infer, "Tokens to tokens, JSON or binary tensors", InferBody),
            *post("/generate", self.generate, "Text to text", TextInputBody),
            *post("/generate_stream", self.generate_stream, "Text to text, streamed", TextInputBody),
            *post("/stopInfer", self.parse_stop, "End a request with what it has", StopBody),
        )

    def error_reply(self, error: ServingError) -> ErrorReply:
        return tgi_reply(error)

    # -- health and metadata

    async def live(self, request: HttpRequest) -> Reply:
        """Raises Unavailable."""
        self._health.check_live()
        return Reply(b'{"live":true}' if self._is_oip(request) else b"")

    async def ready(self, request: HttpRequest) -> Reply:
        """503 also while the queue is full, so that a balancer turns elsewhere."""
        try:
            self._health.check_ready()
        except Overloaded as error:
            return Reply(msgspec.json.encode({"message": str(error)}), status=503, headers={"Retry-After": "1"})
        return Reply(b'{"ready":true}' if self._is_oip(request) else b"")

    def _is_oip(self, request: HttpRequest) -> bool:
        return self._models.options.has_oip_health or "oip" in request.headers.get("accept", "")

    async def model_ready(self, request: HttpRequest) -> Reply:
        """Raises NotFound, Unavailable."""
        service = self._service(request)
        self._health.check_live()
        service.check_ready()
        name = msgspec.json.encode({"name": service.name, "ready": True})
        return Reply(name if self._is_oip(request) else b"")

    async def server(self, request: HttpRequest) -> Reply:
        is_oip = request.query.get("format") == "oip"
        card = self._models.default.card
        return Reply(msgspec.json.encode(triton_models.server_metadata(card, self._version, is_oip)))

    async def model(self, request: HttpRequest) -> Reply:
        """Raises NotFound."""
        return Reply(msgspec.json.encode(triton_models.model_metadata(self._service(request), VERSION)))

    async def config(self, request: HttpRequest) -> Reply:
        """Raises NotFound."""
        return Reply(msgspec.json.encode(triton_models.model_config(self._service(request))))

    async def slots(self, request: HttpRequest) -> Reply:
        """Raises NotFound. Counts of the last step."""
        return Reply(msgspec.json.encode(triton_models.slot_count(self._service(request))))

    def _service(self, request: HttpRequest) -> GenerationService:
        version = request.path.get("version", VERSION)
        if version != VERSION:
            raise NotFound(f"the model {request.path['model']!r} has no version {version!r}; there is {VERSION}")
        return self._models.get(request.path["model"])

    # -- inference

    def infer(self, request: HttpRequest) -> Job:
        """Raises BadRequest, NotFound."""
        service = self._service(request)
        asked = Infer(request.body, request.headers.get(JSON_LENGTH_HEADER))
        if not asked.ids:
            raise invalid("`inputs` cannot be empty")
        question = Question(asked.id or request.headers["x-request-id"], asked.ids, request.tenant)
        generation = generation_of(service, question, asked.parameters, TRITON)
        head = _head(asked.id, service, request)
        return Job(service, generation, InferWriter(generation, head, asked, self._models.options.is_input_echoed))

    def generate(self, request: HttpRequest) -> Job:
        """Raises BadRequest, NotFound."""
        return self._text(request, is_streamed=False)

    def generate_stream(self, request: HttpRequest) -> Job:
        """Raises BadRequest, NotFound."""
        return self._text(request, is_streamed=True)

    def _text(self, request: HttpRequest, is_streamed: bool) -> Job:
        service = self._service(request)
        body = decode_body(generate_decoder, request.body)
        body.refuse_outside()
        if body.id is not None and not body.id:
            raise invalid("`id` cannot be empty")
        id, params, timing = body.id or new_id(), body.parameters or Parameters(), Timing()
        ids = prompt_of(service, body.text_input, self._models.options.max_input_chars, params, "text_input")
        generation = generation_of(service, Question(id, ids, request.tenant, "text_input"), params, TRITON)
        writer = TextWriter(service, generation, _head(id, service, request), bool(params.details), timing)
        return Job(service, generation, writer, is_streamed, media_type=MEDIA_TYPE, timing=timing)

    def parse_stop(self, request: HttpRequest) -> _Stop:
        """Raises NotFound, BadRequest."""
        service = self._service(request)
        body = decode_body(stop_decoder, request.body)
        return _Stop(service, body.id, bytes(request.body))

    async def stop(self, request: HttpRequest, job: _Stop) -> Reply:
        """Ends every running request of this id, whatever it looks like; the answer is the body.

        Raises NotFound, and BadRequest for ids that the documented server rejects.
        """
        if not job.service.stop(job.id):
            if not _ID.match(job.id):
                raise BadRequest("id", "must be 1 to 256 letters, digits, - or _")
            raise NotFound(f"RequestId is {job.id} not found.")
        return Reply(job.body)


def _head(id: str, service: GenerationService, request: HttpRequest) -> dict[str, Any]:
    return {"id": id, "model_name": service.name, "model_version": request.path.get("version")}
