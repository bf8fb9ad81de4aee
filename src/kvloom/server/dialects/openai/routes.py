"""The OpenAI dialect: chat completions, text completions, models."""

from dataclasses import replace

import msgspec

from kvloom.contract.errors import ServingError
from kvloom.contract.sampling import SamplingParams
from kvloom.server.chat.request import prepare
from kvloom.server.dialects.ids import new_id
from kvloom.server.dialects.openai.bodies import ChatBody, CompletionBody
from kvloom.server.dialects.openai.model_cards import models_reply
from kvloom.server.dialects.openai.writers import ChatWriter, TextWriter
from kvloom.server.dialects.sampling import advised
from kvloom.server.errors import ErrorReply, openai_reply
from kvloom.server.http import sse
from kvloom.server.http.body import decode_body
from kvloom.server.http.job import Job
from kvloom.server.http.reply import Endpoint, HttpRequest, Reply, job_route
from kvloom.server.serving.generation import Generation
from kvloom.server.serving.prompts import check_count, encode_prompts
from kvloom.server.serving.registry import Models
from kvloom.server.serving.service import GenerationService

_chat_decoder = msgspec.json.Decoder(ChatBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)


class LoadBody(msgspec.Struct):
    model: str | None = None


_load_decoder = msgspec.json.Decoder(LoadBody)


class OpenAI:
    def __init__(self, models: Models) -> None:
        self._models = models

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return (
            job_route("/v1/chat/completions", self.chat, "Chat", ChatBody),
            job_route("/v1/completions", self.completion, "Text", CompletionBody),
            Endpoint(
                "POST",
                "/load_model",
                None,
                "transformers chat: whether a model is loaded",
                (LoadBody,),
                parse=self.load,
            ),
            Endpoint("GET", "/v1/models", self.models, "The served models"),
            Endpoint("GET", "/v1/models/{name:path}", self.models, "One model"),
        )

    def error_reply(self, error: ServingError) -> ErrorReply:
        return openai_reply(error)

    async def models(self, request: HttpRequest) -> Reply:
        """GET /v1/models and /v1/models/NAME. Raises NotFound."""
        return models_reply(self._models, request, int(self._models.started_s))

    def load(self, request: HttpRequest) -> Reply:
        """POST /load_model: every model is loaded, which the one event says. Raises BadRequest, NotFound."""
        service = self._models.choose(decode_body(_load_decoder, request.body).model)
        told = {"status": "ready", "cached": True, "model": service.name}
        return Reply(sse.event(msgspec.json.encode(told)), media_type=sse.MEDIA_TYPE)

    def chat(self, request: HttpRequest) -> Job:
        """POST /v1/chat/completions. Raises BadRequest, NotFound."""
        body = decode_body(_chat_decoder, request.body)
        service = self._models.choose(body.model)
        params = advised(body.params(self._models.options.default_max_tokens), body, service)
        chat = prepare(service, body.chat(), params)
        generation = _generation("chatcmpl", (chat.prompt_ids,), chat.params, body, request)
        predicted = _predicted(service, body)
        generation = replace(_with_transfer(generation, body, service), sight=chat.sight, prediction=predicted)
        service.check(generation, "messages")
        body.check_context(generation.prompts, service.engine.max_seq_len)
        body.messages, body.tools, body.prediction = [], None, None  # prompt and generation hold them
        writer = ChatWriter(service, generation, body, int(request.time_s), chat)
        return Job(service, generation, writer, bool(body.stream))

    def completion(self, request: HttpRequest) -> Job:
        """POST /v1/completions. Raises BadRequest, NotFound."""
        body = decode_body(_completion_decoder, request.body)
        service = self._models.choose(body.model)
        params = advised(body.params(), body, service)
        items, limit = body.texts_or_ids(), service.input_limit(params)
        check_count(len(items) * (body.best_of or body.n or 1), "prompt")
        prompts = encode_prompts(service, items, "prompt", limit, body.add_special_tokens is not False)
        generation = _with_transfer(_generation("cmpl", prompts, params, body, request), body, service)
        service.check(generation, "prompt")
        body.check_context(generation.prompts, service.engine.max_seq_len)
        body.prompt = ""  # replaced by its tokens
        writer = TextWriter(service, generation, body, int(request.time_s))
        return Job(service, generation, writer, bool(body.stream), tells_prompt=bool(body.echo))


def _predicted(service: GenerationService, body: ChatBody) -> tuple[int, ...]:
    """The first tokens of the predicted answer, no more than the model's context has."""
    if body.prediction is None:
        return ()
    most = service.engine.max_seq_len
    return tuple(service.tokenizer.encode_within(body.prediction.text, most, add_special_tokens=False))


def _with_transfer(generation: Generation, body: ChatBody | CompletionBody, service: GenerationService) -> Generation:
    """The generation with the body's parameters for KV blocks that go from one server to another. Raises BadRequest."""
    asked = body.kv_transfer_params
    if asked is None:
        return generation
    return replace(generation, gives_kv=bool(asked.do_remote_decode), kv_location=asked.location(service))


def _generation(
    kind: str,
    prompts: tuple[tuple[int, ...], ...],
    params: SamplingParams,
    body: ChatBody | CompletionBody,
    request: HttpRequest,
) -> Generation:
    """`kind` begins the answer's id."""
    n = body.n or 1
    count = (n, body.best_of or n)
    salt = body.cache_salt or ""
    id = f"{kind}-{new_id()}"
    return Generation(id, prompts, params, *count, body.priority or 0, request.tenant, cache_salt=salt)
