"""The Text Generation Inference dialect, version 0.9.4: /, /generate, /generate_stream, /info."""

from typing import Any

import msgspec

from kvloom.contract.errors import ServingError
from kvloom.server.dialects.constraints import Constraints
from kvloom.server.dialects.parameters import (
    MAX_BEST_OF,
    MAX_STOPS,
    TGI,
    Parameters,
    Question,
    generation_of,
    invalid,
    prompt_of,
    refuse_best_of,
)
from kvloom.server.dialects.tgi.writer import ArrayWriter, TgiWriter
from kvloom.server.errors import ErrorReply, tgi_reply
from kvloom.server.http.body import decode_body
from kvloom.server.http.job import Job
from kvloom.server.http.reply import Endpoint, HttpRequest, Reply, job_route
from kvloom.server.observe.timing import Timing
from kvloom.server.serving.registry import Models
from kvloom.server.serving.service import GenerationService


class GenerateBody(Constraints, kw_only=True):
    """/generate and /generate_stream, where `stream` has no effect (the route says it)."""

    inputs: str
    parameters: Parameters | None = None


class RootBody(GenerateBody, kw_only=True):
    """POST /: streams when `stream` says so."""

    stream: bool | None = False


_generate_decoder = msgspec.json.Decoder(GenerateBody)
_root_decoder = msgspec.json.Decoder(RootBody)


class TextGeneration:
    """Serves the default model: TGI bodies name none. POST /generate is shared with vLLM; see generate.py."""

    def __init__(self, models: Models, version: str = "") -> None:
        self._models, self._version = models, version

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return (
            job_route("/", self.parse_root, "TGI: generate, whole or streamed", RootBody),
            job_route("/invocations", self.parse_root, "TGI: the same for SageMaker", RootBody),
            job_route("/generate_stream", self.parse_stream, "TGI: generate, streamed", GenerateBody),
            Endpoint("GET", "/info", self.info, "TGI: the served models and their limits"),
        )

    def error_reply(self, error: ServingError) -> ErrorReply:
        return tgi_reply(error)

    def parse_root(self, request: HttpRequest) -> Job:
        """POST /: an array with one answer, as in TGI, or a stream."""
        body = decode_body(_root_decoder, request.body)
        body.refuse_outside()
        params = body.parameters or Parameters()
        if body.stream and params.decoder_input_details:
            raise invalid("`decoder_input_details` == true is not supported when streaming tokens")
        return self._job(
            body, request, bool(body.stream), TgiWriter if self._models.options.is_root_object else ArrayWriter
        )

    def parse_generate(self, request: HttpRequest) -> Job:
        """POST /generate: one answer; `stream` is ignored."""
        body = decode_body(_generate_decoder, request.body)
        body.refuse_outside()
        return self._job(body, request, is_stream=False)

    def parse_stream(self, request: HttpRequest) -> Job:
        """POST /generate_stream. With decoder_input_details the last event's details hold the prompt's tokens."""
        body = decode_body(_generate_decoder, request.body)
        body.refuse_outside()
        return self._job(body, request, is_stream=True)

    def _job(
        self, body: GenerateBody, request: HttpRequest, is_stream: bool, writer_of: type[TgiWriter] = TgiWriter
    ) -> Job:
        """Raises BadRequest in TGI's words, NotFound."""
        params = body.parameters or Parameters()
        if is_stream:
            refuse_best_of(params)
        service = self._models.of_adapter(params.adapter_id)
        ids = prompt_of(service, body.inputs, self._models.options.max_input_chars, params)
        has_logprobs = bool(params.details or params.decoder_input_details or params.top_n_tokens) or is_stream
        question, timing = Question(request.headers["x-request-id"], ids, request.tenant), Timing()
        generation = generation_of(service, question, params, TGI, has_logprobs)
        writer = writer_of(service, generation, body.inputs, params, timing)
        return Job(service, generation, writer, is_stream, timing=timing)

    # -- information

    async def info(self, request: HttpRequest) -> Reply:
        """The documented object (spec 3.3.2.1.2) and TGI's flat keys; those without a meaning here are null."""
        default = self._models.default
        engine = default.card.engine
        return Reply(
            msgspec.json.encode(
                {
                    **_model_info(default),
                    "docker_label": None,
                    "max_batch_total_tokens": engine.max_prefill_tokens or engine.max_tokens_per_step,
                    "max_best_of": MAX_BEST_OF,
                    "max_concurrent_requests": engine.max_batch,
                    "max_input_length": default.max_input_tokens,
                    "max_stop_sequences": MAX_STOPS,
                    "max_waiting_tokens": None,
                    "models": [_model_info(service) for service in self._models],
                    "sha": None,
                    "validation_workers": None,
                    "version": self._version,
                    "waiting_served_ratio": None,
                }
            )
        )


def _model_info(service: GenerationService) -> dict[str, Any]:
    return {
        "model_device_type": service.card.engine.device,
        "model_dtype": service.card.dtype,
        "model_id": service.name,
        "model_pipeline_tag": "text-generation",
        "max_total_tokens": service.engine.max_seq_len,
        "model_sha": None,
    }
