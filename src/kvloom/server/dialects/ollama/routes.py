"""Ollama's /api over the same chat: chat and generate, whole or as lines of JSON, embeddings, and the served models."""

from array import array
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from kvloom.contract.errors import BadRequest, NotFound, ServingError
from kvloom.contract.pooling import unit
from kvloom.server.dialects.ids import new_id
from kvloom.server.dialects.ollama.bodies import OllamaChat, OllamaGenerate
from kvloom.server.dialects.ollama.models import ModelTable
from kvloom.server.dialects.ollama.shapes import AnswerWriter, Heading
from kvloom.server.dialects.openai.embeddings import NOTHING, check_embeds, states_of
from kvloom.server.dialects.openai.shapes import raw_list
from kvloom.server.errors import ErrorReply, ollama_reply
from kvloom.server.http.body import decode_body
from kvloom.server.http.job import Job, WholeWriter, answer
from kvloom.server.http.reply import Endpoint, HttpRequest, Reply, job_route
from kvloom.server.http.sse import NDJSON
from kvloom.server.observe.timing import Timing
from kvloom.server.serving.generation import MAX_EMBEDDINGS, Generation
from kvloom.server.serving.prompts import begin_of, check_count, embedded_text, encode_prompts
from kvloom.server.serving.registry import Models
from kvloom.server.serving.service import GenerationService

API_VERSION = "0.12.11"  # whose API this is: clients look for features by it
LATEST = ":latest"


class EmbedBody(msgspec.Struct, kw_only=True):
    """`options` and `keep_alive` have no effect."""

    model: Annotated[str, Meta(min_length=1)]
    input: str | list[str] | None = None
    truncate: bool | None = None  # default true: a text that is too long is truncated at its end
    dimensions: Annotated[int, Meta(ge=0)] | None = None  # 0: all


class OlderEmbedBody(msgspec.Struct, kw_only=True):
    """`options` and `keep_alive` have no effect."""

    model: Annotated[str, Meta(min_length=1)]
    prompt: str | None = None


class ShowBody(msgspec.Struct, kw_only=True):
    model: str = ""
    name: str = ""  # its older name


_chat_decoder = msgspec.json.Decoder(OllamaChat)
_generate_decoder = msgspec.json.Decoder(OllamaGenerate)
_embed_decoder = msgspec.json.Decoder(EmbedBody)
_older_decoder = msgspec.json.Decoder(OlderEmbedBody)
_show_decoder = msgspec.json.Decoder(ShowBody)
_REFUSED = {
    "pull": "POST",
    "push": "POST",
    "create": "POST",
    "copy": "POST",
    "delete": "DELETE",
    "blobs/{digest}": "POST",
}


class _Load(NamedTuple):
    """A request that asks for nothing but that the model be there."""

    service: GenerationService
    line: bytes


class Ollama:
    def __init__(self, models: Models) -> None:
        self._models = models
        self._table = ModelTable(models.started_s)

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        def generates(path: str, parse: Any, summary: str, body: type) -> Endpoint:
            return replace(job_route(path, parse, summary, body), answer=self.answer)

        def embeds(path: str, parse: Any, summary: str, body: type) -> Endpoint:
            return Endpoint("POST", path, None, summary, (body,), is_generating=True, parse=parse)

        refused = [
            Endpoint(verb, f"/api/{name}", partial(_refuse, name), "Ollama: refused") for name, verb in _REFUSED.items()
        ]
        return (
            generates("/api/chat", self.chat, "Ollama: chat", OllamaChat),
            generates("/api/generate", self.generate, "Ollama: the answer to a prompt", OllamaGenerate),
            embeds("/api/embed", self.texts, "Ollama: vectors of texts", EmbedBody),
            embeds("/api/embeddings", self.text, "Ollama: the vector of a text, older", OlderEmbedBody),
            Endpoint("GET", "/api/version", self.version, "Ollama: whose version of the API this is"),
            Endpoint("GET", "/api/tags", self.tags, "Ollama: the served models"),
            Endpoint("GET", "/api/ps", self.loaded, "Ollama: the same, as they lie in memory"),
            Endpoint(*("POST", "/api/show", self.show, "Ollama: one model", (ShowBody,)), parse=self.shown),
            *refused,
        )

    def error_reply(self, error: ServingError) -> ErrorReply:
        return ollama_reply(error)

    # -- answers

    def chat(self, request: HttpRequest) -> Job | _Load:
        """Raises BadRequest, NotFound."""
        body = decode_body(_chat_decoder, request.body)
        return self._parsed(body, Heading("chat", body.model), "messages", request)

    def generate(self, request: HttpRequest) -> Job | _Load:
        """Raises BadRequest, NotFound."""
        body = decode_body(_generate_decoder, request.body)
        return self._parsed(body, Heading("generate", body.model), "prompt", request)

    def _parsed(
        self, body: OllamaChat | OllamaGenerate, heading: Heading, field: str, request: HttpRequest
    ) -> Job | _Load:
        service = self._find(body.model)
        unloads = body.unloads
        if body.loads:
            return _Load(service, heading.empty(request.time_s, "unload" if unloads else "load"))
        asked, timing = body.asked(service), Timing()
        generation = Generation(
            f"ollama-{new_id()}", (asked.prompt_ids,), asked.params, tenant=request.tenant, sight=asked.sight
        )
        service.check(generation, field)
        writer = AnswerWriter(heading, service, asked, timing)
        return Job(service, generation, writer, body.is_streamed, media_type=NDJSON, keep_alive=b"", timing=timing)

    async def answer(self, request: HttpRequest, parsed: Job | _Load) -> Reply:
        """Raises ServingError before anything is answered."""
        if isinstance(parsed, Job):
            return await answer(parsed)
        parsed.service.check_ready()
        return Reply(parsed.line)

    # -- embeddings

    def texts(self, request: HttpRequest) -> Job | Reply:
        """Vectors of length 1. Raises BadRequest, NotFound."""
        body = decode_body(_embed_decoder, request.body)
        service = self._find(body.model)
        check_embeds(service, body.dimensions)
        texts = ([body.input] if isinstance(body.input, str) else body.input) if body.input else []
        prompts = _prompts(service, texts, "input", body.truncate is not False)
        generation, timing = _embedding(service, prompts, request), Timing()
        return _embed(service, _EmbedWriter(generation, body.model, body.dimensions or None, timing), timing)

    def text(self, request: HttpRequest) -> Job | Reply:
        """The model's vector, not normalised. Raises BadRequest, NotFound."""
        body = decode_body(_older_decoder, request.body)
        service = self._find(body.model)
        check_embeds(service, None)
        prompts = _prompts(service, [body.prompt] if body.prompt else [], "prompt", is_cut=True)
        return _embed(service, _OlderEmbedWriter(_embedding(service, prompts, request)), Timing())

    # -- models

    async def version(self, request: HttpRequest) -> Reply:
        return Reply(msgspec.json.encode({"version": API_VERSION}))

    async def tags(self, request: HttpRequest) -> Reply:
        found = [await self._table.tag(service) for service in self._models.served]
        return Reply(msgspec.json.encode({"models": found}))

    async def loaded(self, request: HttpRequest) -> Reply:
        found = [await self._table.loaded(service) for service in self._models.served if service.engine.is_ready]
        return Reply(msgspec.json.encode({"models": found}))

    def shown(self, request: HttpRequest) -> str:
        """The name of the model. Raises BadRequest."""
        body = decode_body(_show_decoder, request.body)
        name = body.model or body.name
        if not name:
            raise BadRequest("model", "is required")
        return name

    async def show(self, request: HttpRequest, name: str) -> Reply:
        """Raises NotFound."""
        return Reply(msgspec.json.encode(await self._table.show(self._find(name))))

    def _find(self, name: str) -> GenerationService:
        """The model that a request names, `:latest` or not; the default model answers for no other. Raises NotFound,
        in Ollama's words.
        """
        names = {service.name for service in self._models.served}
        try:
            return self._models.get(name if name in names else name.removesuffix(LATEST))
        except NotFound:
            raise NotFound(f"model '{name}' not found") from None


def _prompts(service: GenerationService, texts: list[str], field: str, is_cut: bool) -> tuple[tuple[int, ...], ...]:
    """The texts' tokens; a text that is too long is truncated if `is_cut`. Raises BadRequest."""
    if not texts:
        return ()
    most = service.engine.max_seq_len
    check_count(len(texts), field, MAX_EMBEDDINGS)
    texts, is_special = [embedded_text(service, text, field) for text in texts], not service.card.message_form
    items: list[Any] = [begin_of(service, text, most, is_special) for text in texts] if is_cut else texts
    prompts = encode_prompts(service, items, field, most, is_special)
    service.check(Generation("", prompts, NOTHING, pooling=service.engine.info.pooling), field)
    return prompts


async def _refuse(name: str, request: HttpRequest) -> Reply:
    """Raises BadRequest."""
    raise BadRequest(name.partition("/")[0], "is not supported: this server's models are those it was started with")


def _embedding(service: GenerationService, prompts: tuple[tuple[int, ...], ...], request: HttpRequest) -> Generation:
    pooling = service.engine.info.pooling
    return Generation(f"ollama-{new_id()}", prompts, NOTHING, tenant=request.tenant, pooling=pooling)


def _embed(service: GenerationService, writer: WholeWriter, timing: Timing) -> Job | Reply:
    """Of no texts the answer is there at once."""
    generation = writer.generation
    return Job(service, generation, writer, timing=timing) if generation.prompts else writer.whole()


class _EmbedWriter(WholeWriter):
    """`dimensions`: None = all."""

    def __init__(self, generation: Generation, model: str, dimensions: int | None, timing: Timing) -> None:
        super().__init__(generation)
        self._model, self._dimensions, self._timing = model, dimensions, timing

    def whole(self) -> Reply:
        return Reply(
            msgspec.json.encode(
                {
                    "model": self._model,
                    "embeddings": raw_list(
                        unit(states_of(answer), self._dimensions).tolist() for answer in self.answers
                    ),
                    "total_duration": round(self._timing.age_s * 1e9),
                    "load_duration": 0,
                    "prompt_eval_count": self.generation.num_prompt_tokens,
                }
            )
        )


class _OlderEmbedWriter(WholeWriter):
    def whole(self) -> Reply:
        vector = array("f", states_of(self.answers[0])).tolist() if self.answers else []
        return Reply(msgspec.json.encode({"embedding": vector}))
