"""Triton's statistics and model repository extensions: counts since the start, and which models there are."""

from collections.abc import Callable
from typing import Any

import msgspec

from kvloom.contract.errors import BadRequest, NotFound, ServingError, Unavailable
from kvloom.server.dialects.triton.names import MODEL_PATH
from kvloom.server.dialects.triton.routes import VERSION
from kvloom.server.errors import ErrorReply, tgi_reply
from kvloom.server.http.body import decode_body
from kvloom.server.http.reply import Endpoint, HttpRequest, Reply
from kvloom.server.serving.registry import Models
from kvloom.server.serving.service import GenerationService

NO_CONTROL = (
    "explicit model load / unload is not allowed: models are those of the configuration; POST /sleep and /wake_up give "
    "their memory back, POST /v1/load_lora_adapter loads adapters"
)


class IndexBody(msgspec.Struct):
    ready: bool = False  # only the models that answer


_index_decoder = msgspec.json.Decoder(IndexBody)


class TritonRepository:
    """Its routes must be asked before /v2/models/{model}."""

    def __init__(self, models: Models) -> None:
        self._models = models

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        def get(path: str, answer: Callable[[HttpRequest], Any], summary: str) -> Endpoint:
            return Endpoint("GET", path, answer, summary, is_management=True)

        def control(verb: str) -> Endpoint:
            path, summary = f"/v2/repository/models/{{model}}/{verb}", "Refused: models are those of the configuration"
            return Endpoint("POST", path, self.control, summary, is_management=True)

        return (
            get("/v2/models/stats", self.all_stats, "Counts and times of every model, since the start"),
            get(MODEL_PATH + "/stats", self.stats, "Counts and times of the model, since the start"),
            get(MODEL_PATH + "/versions/{version}/stats", self.stats, "The same"),
            Endpoint(
                *(
                    "POST",
                    "/v2/repository/index",
                    self.index,
                    "Which models there are, and whether they answer",
                    (IndexBody,),
                ),
                is_management=True,
                parse=self.parse_index,
            ),
            control("load"),
            control("unload"),
        )

    def error_reply(self, error: ServingError) -> ErrorReply:
        return tgi_reply(error)

    async def all_stats(self, request: HttpRequest) -> Reply:
        return Reply(msgspec.json.encode({"model_stats": [model_stats(service) for service in self._models]}))

    async def stats(self, request: HttpRequest) -> Reply:
        """Counts are a model's, its adapters' included. Raises NotFound."""
        name, version = request.path["model"], request.path.get("version", VERSION)
        service = self._models.base(name)
        if version != VERSION:
            raise NotFound(f"the model {name!r} has no version {version!r}; there is {VERSION}")
        return Reply(msgspec.json.encode({"model_stats": [model_stats(service)]}))

    def parse_index(self, request: HttpRequest) -> IndexBody:
        """The body may be left out. Raises BadRequest."""
        return decode_body(_index_decoder, request.body) if request.body.strip() else IndexBody()

    async def index(self, request: HttpRequest, body: IndexBody) -> Reply:
        entries = [_entry(service) for service in self._models.served]
        shown = [entry for entry in entries if entry["state"] == "READY" or not body.ready]
        return Reply(msgspec.json.encode(shown))

    async def control(self, request: HttpRequest) -> Reply:
        """Raises NotFound, BadRequest."""
        self._models.get(request.path["model"])
        raise BadRequest("", NO_CONTROL)


def _entry(service: GenerationService) -> dict[str, str]:
    state, reason = "READY", ""
    try:
        service.check_ready()
    except Unavailable as error:
        state, reason = "UNAVAILABLE", str(error)
    return {"name": service.name, "version": VERSION, "state": state, "reason": reason}


def model_stats(service: GenerationService) -> dict[str, Any]:
    """Times in ns, whole generations' but for `batch_stats`, which are the steps' by their number of sequences.

    What is not measured here (the copies of tensors in and out, a response cache, which there is none of) has count 0.
    """
    meter, stats = service.meter, service.engine.stats()
    none = _duration(0, 0.0)
    return {
        "name": service.name,
        "version": VERSION,
        "last_inference": int(meter.last_s * 1e3),
        "inference_count": meter.num_answers,
        "execution_count": stats.total_steps,
        "inference_stats": {
            "success": _duration(meter.prompt_tokens.count, meter.served_s),
            "fail": _duration(meter.num_failed, meter.failed_s),
            "queue": _duration(meter.queue.count, meter.queue.sum),
            "compute_input": none,
            "compute_infer": _duration(meter.inference.count, meter.inference.sum),
            "compute_output": none,
            "cache_hit": none,
            "cache_miss": none,
        },
        "batch_stats": [
            {
                "batch_size": times.num_seqs,
                "compute_input": none,
                "compute_infer": _duration(times.num_steps, times.compute_s),
                "compute_output": none,
            }
            for times in stats.batches
        ],
    }


def _duration(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": int(seconds * 1e9)}
