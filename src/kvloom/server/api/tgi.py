"""The Text Generation Inference dialect, version 0.9.4: /, /generate, /generate_stream, /info."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from kvloom.engine.errors import ServingError
from kvloom.server.api.parameters import (
    MAX_BEST_OF,
    MAX_STOPS,
    TGI,
    Parameters,
    generation_of,
    invalid,
    prompt_of,
)
from kvloom.server.api.tgi_shapes import GenerateBody, RootBody, Stream, details_of
from kvloom.server.body import decode_body
from kvloom.server.errors import ErrorReply, tgi_error, tgi_reply
from kvloom.server.generation import Answer, Generation, GenerationService
from kvloom.server.models import Models
from kvloom.server.reply import Call, Endpoint, Events, Reply
from kvloom.server.sse import MEDIA_TYPE, event

_generate_decoder = msgspec.json.Decoder(GenerateBody)
_root_decoder = msgspec.json.Decoder(RootBody)


class TextGeneration:
    """Serves the default model: TGI bodies name none. POST /generate is shared with vLLM; see generate.py."""

    def __init__(self, models: Models, version: str = "") -> None:
        self._models, self._version = models, version

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return (
            Endpoint("POST", "/", self.root, "TGI: generate, whole or streamed", (RootBody,), True, is_streaming=True),
            Endpoint(
                "POST", "/invocations", self.root, "TGI: the same for SageMaker", (RootBody,), True, is_streaming=True
            ),
            Endpoint(
                "POST",
                "/generate_stream",
                self.stream,
                "TGI: generate, streamed",
                (GenerateBody,),
                True,
                is_streaming=True,
            ),
            Endpoint("GET", "/info", self.info, "TGI: the served models and their limits"),
        )

    def error_reply(self, error: ServingError) -> ErrorReply:
        return tgi_reply(error)

    async def root(self, call: Call) -> Reply:
        """POST /: an array of one answer, as TGI gives it, or a stream."""
        body = decode_body(_root_decoder, call.body)
        params = body.parameters or Parameters()
        if body.stream:
            if params.decoder_input_details:
                raise invalid("`decoder_input_details` == true is not supported when streaming tokens")
            return await self._stream(body.inputs, params, call)
        answer, headers = await self._answer(body.inputs, params, call)
        is_object = self._models.options.is_root_object
        return Reply(msgspec.json.encode(answer if is_object else [answer]), headers=headers)

    async def generate(self, call: Call) -> Reply:
        """POST /generate: one answer; `stream` is ignored."""
        body = decode_body(_generate_decoder, call.body)
        answer, headers = await self._answer(body.inputs, body.parameters or Parameters(), call)
        return Reply(msgspec.json.encode(answer), headers=headers)

    async def stream(self, call: Call) -> Reply:
        """POST /generate_stream. With decoder_input_details the last event's details hold the prompt's tokens."""
        body = decode_body(_generate_decoder, call.body)
        return await self._stream(body.inputs, body.parameters or Parameters(), call)

    # -- answers

    def _generation(
        self, service: GenerationService, inputs: str, params: Parameters, call: Call, is_stream: bool
    ) -> Generation:
        """Raises BadRequest in TGI's words."""
        ids = prompt_of(service, inputs, self._models.options.max_input_chars)
        has_logprobs = bool(params.details or params.decoder_input_details or params.top_n_tokens) or is_stream
        id = call.headers["x-request-id"]
        return generation_of(service, id, ids, params, TGI, tenant=call.tenant, has_logprobs=has_logprobs)

    async def _answer(self, inputs: str, params: Parameters, call: Call) -> tuple[dict[str, Any], dict[str, str]]:
        service = self._models.of_adapter(params.adapter_id)
        generation = self._generation(service, inputs, params, call, is_stream=False)
        answers = await service.collect(generation)
        answers.sort(key=_mean_logprob, reverse=True)
        before = inputs if params.return_full_text else ""
        best = answers[0]
        reply: dict[str, Any] = {"generated_text": before + best.text}
        if params.details or params.decoder_input_details:
            reply["details"] = self._details(service, best, params)
            if len(answers) > 1:
                reply["details"]["best_of_sequences"] = [
                    {"generated_text": before + answer.text, **self._details(service, answer, params)}
                    for answer in answers[1:]
                ]
        return reply, _headers(service, inputs, best)

    def _details(self, service: GenerationService, answer: Answer, params: Parameters) -> dict[str, Any]:
        return details_of(service.tokenizer, answer, bool(params.decoder_input_details), params.top_n_tokens or 0)

    async def _stream(self, inputs: str, params: Parameters, call: Call) -> Reply:
        if (params.best_of or 1) > 1:
            raise invalid("`best_of` != 1 is not allowed for this endpoint")
        service = self._models.of_adapter(params.adapter_id)
        generation = self._generation(service, inputs, params, call, is_stream=True)
        events = await Events.begin(self._events(service, generation, inputs, params), error_event)
        return Reply(media_type=MEDIA_TYPE, events=events)

    async def _events(
        self, service: GenerationService, generation: Generation, inputs: str, params: Parameters
    ) -> AsyncGenerator[bytes]:
        before = inputs if params.return_full_text else ""
        has_details = bool(params.details or params.decoder_input_details)
        eos_id = min(service.tokenizer.eos_ids, default=0)
        stream = Stream(service.tokenizer, before, has_details, params.top_n_tokens or 0, eos_id)
        async with aclosing(service.stream(generation)) as deltas:
            async for _, delta in deltas:
                if delta.prompt_logprobs is not None:
                    stream.set_prefill(generation.prompts[0], delta.prompt_logprobs)
                if delta.token_ids or delta.finish_reason:
                    yield event(msgspec.json.encode(stream.event(delta)))

    # -- information

    async def info(self, call: Call) -> Reply:
        """The seed's nested object and TGI's flat keys; what has no meaning here is null."""
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


def error_event(error: ServingError) -> bytes:
    return event(msgspec.json.encode(tgi_error(error)))


def _model_info(service: GenerationService) -> dict[str, Any]:
    return {
        "model_device_type": service.card.engine.device,
        "model_dtype": service.card.dtype,
        "model_id": service.name,
        "model_pipeline_tag": "text-generation",
        "max_total_tokens": service.engine.max_seq_len,
        "model_sha": None,
    }


def _mean_logprob(answer: Answer) -> float:
    return sum(value.logprob for value in answer.logprobs) / max(1, len(answer.logprobs))


def _headers(service: GenerationService, inputs: str, answer: Answer) -> dict[str, str]:
    """TGI's headers of a whole answer; times in ms, compute time in seconds."""
    timing = answer.timing
    inference_s = (timing.first_token_s or 0.0) + timing.decode_s
    total_s = timing.queue_s + inference_s
    per_token_s = inference_s / max(1, len(answer.token_ids))
    return {
        "x-compute-type": f"1-{service.card.engine.device}",
        "x-compute-time": f"{total_s:.3f}",
        "x-compute-characters": str(len(inputs)),
        "x-total-time": f"{total_s * 1e3:.0f}",
        "x-validation-time": "0",
        "x-queue-time": f"{timing.queue_s * 1e3:.0f}",
        "x-inference-time": f"{inference_s * 1e3:.0f}",
        "x-time-per-token": f"{per_token_s * 1e3:.0f}",
    }
