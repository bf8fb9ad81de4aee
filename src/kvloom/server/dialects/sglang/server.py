"""SGLang's routes that routers use: model, limits, load, health by generating a token; and a flush of the cache."""

from collections.abc import Callable
from typing import Any

import msgspec

from kvloom.contract.errors import ServingError, Unavailable
from kvloom.server.errors import ErrorReply, openai_reply
from kvloom.server.http.reply import Endpoint, HttpRequest, Reply
from kvloom.server.serving.health import Health
from kvloom.server.serving.probe import probe
from kvloom.server.serving.registry import Models
from kvloom.server.serving.service import GenerationService

HEALTH_LIMIT_S = 20  # seconds within which a token must come, as in SGLang's server


class SglangServer:
    """Reports are about the first model; a flush is for all."""

    def __init__(self, models: Models, health: Health, number: str) -> None:
        """`number`: this server's version."""
        self._models, self._health, self._number = models, health, number

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        def get(path: str, answer: Callable[[HttpRequest], Any], summary: str) -> Endpoint:
            return Endpoint("GET", path, answer, summary, is_management=True)

        return (
            get("/health_generate", self.health_generate, "Health, shown by a real inference of one token"),
            get("/model_info", self.model_info, "Which model is served, by SGLang's names"),
            get("/get_model_info", self.model_info, "The same"),
            get("/get_server_info", self.server_info, "Limits of the first model, by SGLang's names"),
            get("/get_load", self.load, "Requests and tokens that the server holds"),
            Endpoint("POST", "/flush_cache", self.flush_cache, "Forget cached prefixes", is_management=True),
        )

    def error_reply(self, error: ServingError) -> ErrorReply:
        return openai_reply(error)

    async def health_generate(self, request: HttpRequest) -> Reply:
        """Raises Unavailable."""
        self._health.check()
        try:
            await probe(self._models, request.headers["x-request-id"], HEALTH_LIMIT_S)
        except ServingError as error:
            raise Unavailable(str(error)) from None
        return Reply()

    async def model_info(self, request: HttpRequest) -> Reply:
        service = self._models.default
        return _json(
            {
                "model_path": model_path(service),
                "tokenizer_path": model_path(service),
                "served_model_name": service.name,
                "is_generation": True,
                "preferred_sampling_params": None,
                "has_image_understanding": service.engine.info.sees,
                "has_audio_understanding": False,
            }
        )

    async def server_info(self, request: HttpRequest) -> Reply:
        return _json(server_facts(self._models.default, self._number))

    async def load(self, request: HttpRequest) -> Reply:
        """One entry, since a server is one data-parallel rank; of all its models together. `num_tokens`: of the KV."""
        held = [(service.engine.stats(), service.engine.info.block_size) for service in self._models]
        num_waiting = sum(stats.num_waiting for stats, _ in held) + self._models.admission.num_waiting
        return _json(
            [
                {
                    "dp_rank": 0,
                    "num_reqs": sum(stats.num_running for stats, _ in held) + num_waiting,
                    "num_waiting_reqs": num_waiting,
                    "num_tokens": sum((stats.num_blocks - stats.num_free_blocks) * size for stats, size in held),
                }
            ]
        )

    async def flush_cache(self, request: HttpRequest) -> Reply:
        """Reset the prefix cache; running requests keep their blocks. Raises Unavailable."""
        for service in self._models:
            await service.engine.reset_prefix_cache(preempts=False)
        return Reply(b"Cache flushed.\n", media_type="text/plain; charset=utf-8")


def model_path(service: GenerationService) -> str:
    """Where the weights come from; a model without any is known by its name."""
    return service.card.engine.model or service.name


def server_facts(service: GenerationService, number: str) -> dict[str, Any]:
    """The parts of SGLang's arguments and limits that have a counterpart here."""
    config, info = service.card.engine, service.engine.info
    return {
        "version": number,
        "model_path": model_path(service),
        "tokenizer_path": model_path(service),
        "served_model_name": service.name,
        "tp_size": config.world_size,
        "dp_size": 1,
        "dtype": service.card.dtype,
        "device": config.device,
        "page_size": info.block_size,
        "context_length": service.engine.max_seq_len,
        "max_running_requests": config.max_batch,
        "max_prefill_tokens": config.max_tokens_per_step,
        "max_total_num_tokens": info.num_blocks * info.block_size,
        "disaggregation_mode": "null",
    }


def _json(value: Any) -> Reply:
    return Reply(msgspec.json.encode(value))
