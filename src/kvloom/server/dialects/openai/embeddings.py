"""/v1/embeddings as in OpenAI's API: the pooled states of texts or tokens, scaled to length 1."""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvloom.contract.errors import BadRequest, ServingError
from kvloom.contract.pooling import POOLINGS, modes_of, unit
from kvloom.contract.sampling import SamplingParams
from kvloom.server.dialects.ids import new_id
from kvloom.server.dialects.openai.bodies import TokenId, texts_or_ids
from kvloom.server.dialects.openai.shapes import raw_list
from kvloom.server.errors import ErrorReply, openai_reply
from kvloom.server.http.body import decode_body
from kvloom.server.http.job import Job, WholeWriter
from kvloom.server.http.reply import Endpoint, HttpRequest, Reply
from kvloom.server.serving.generation import MAX_EMBEDDINGS, Answer, Generation
from kvloom.server.serving.prompts import begin_of, check_count, embedded_text, encode_prompts
from kvloom.server.serving.registry import Models
from kvloom.server.serving.service import GenerationService

NOTHING = SamplingParams(max_tokens=0)


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """`dimensions`: only the first so many numbers of a vector, of length 1 again. `prompt_name`: what the model wants
    before each text, by the name that its files give it. `user` has no effect."""

    model: str | None = None
    input: str | list[str | TokenId | list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None
    add_special_tokens: bool | None = None  # of texts; true unless given
    priority: Annotated[int, Meta(ge=0, le=5)] | None = None  # 1 the most urgent; 0 = none
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None  # of each input; -1 = as many as the model reads
    prompt_name: str | None = None

    def prompts(self, service: GenerationService) -> tuple[tuple[int, ...], ...]:
        """Raises BadRequest."""
        is_special = self.add_special_tokens is not False and not service.card.message_form
        vocab_size = service.engine.info.vocab_size
        items = [self._prompted(service, item) for item in texts_or_ids(self.input, "input")]
        check_count(len(items), "input", MAX_EMBEDDINGS)
        limit = service.input_limit(NOTHING)
        if self.truncate_prompt_tokens is not None:
            most = self._most_tokens(limit)
            items = [begin_of(service, item, most, is_special) for item in items]
        prompts = encode_prompts(service, items, "input", limit, is_special)
        for ids in prompts:
            if max(ids, default=0) >= vocab_size:
                raise BadRequest("input", f"token id {max(ids)} is outside the vocabulary of {vocab_size}")
        return prompts

    def _most_tokens(self, limit: int) -> int:
        """Of each input. Raises BadRequest."""
        most = limit if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens or 0
        if not 0 < most <= limit:
            raise BadRequest("truncate_prompt_tokens", f"must be -1 or 1 to {limit}, got {most}")
        return most

    def _prompted(self, service: GenerationService, item: str | Sequence[int]) -> str | Sequence[int]:
        """Raises BadRequest when the model has no such prompt, or the input is not text."""
        if self.prompt_name is None:
            return embedded_text(service, item, "input") if isinstance(item, str) else item
        known = service.card.prompts
        if self.prompt_name not in known:
            named = f"it has {', '.join(known)}" if known else "it has none"
            raise BadRequest("prompt_name", f"{self.prompt_name!r:.80} is no prompt of this model; {named}")
        if not isinstance(item, str):
            raise BadRequest("prompt_name", "goes before texts; the input is in tokens")
        return embedded_text(service, item, "input", known[self.prompt_name])

    def check(self, service: GenerationService) -> None:
        """Raises BadRequest for options that this server, or this model, does not support."""
        check_embeds(service, self.dimensions)


_decoder = msgspec.json.Decoder(EmbeddingBody)


def check_embeds(service: GenerationService, num_dimensions: int | None) -> None:
    """Raises BadRequest when the model makes no such vectors."""
    info = service.engine.info
    if info.labels:
        raise BadRequest(
            "model", "is a classifier and makes no embeddings; ask /classify, or /rerank where it has one label"
        )
    if not modes_of(info.pooling):
        raise BadRequest("model", f"makes its embeddings by {info.pooling}; this server has {', '.join(POOLINGS)}")
    if num_dimensions is not None and num_dimensions > info.hidden_size:
        raise BadRequest("dimensions", f"must be at most {info.hidden_size}, got {num_dimensions}")


class Embeddings:
    def __init__(self, models: Models) -> None:
        self._models = models

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        one = ("POST", "/v1/embeddings", None, "Vectors of texts", (EmbeddingBody,))
        return (Endpoint(*one, is_generating=True, parse=self.parse),)

    def error_reply(self, error: ServingError) -> ErrorReply:
        return openai_reply(error)

    def parse(self, request: HttpRequest) -> Job:
        """Raises BadRequest, NotFound."""
        body = decode_body(_decoder, request.body)
        service = self._models.choose(body.model)
        body.check(service)
        generation = Generation(
            f"embd-{new_id()}",
            body.prompts(service),
            NOTHING,
            priority=body.priority or 0,
            tenant=request.tenant,
            pooling=service.engine.info.pooling,
        )
        service.check(generation, "input")
        body.input = ""  # replaced by its tokens
        return Job(service, generation, _Writer(service, generation, body))


class _Writer(WholeWriter):
    def __init__(self, service: GenerationService, generation: Generation, body: EmbeddingBody) -> None:
        super().__init__(generation)
        self._service, self._body = service, body

    def whole(self) -> Reply:
        num_tokens = self.generation.num_prompt_tokens
        return Reply(
            msgspec.json.encode(
                {
                    "object": "list",
                    "data": raw_list(_entry(index, answer, self._body) for index, answer in enumerate(self.answers)),
                    "model": self._service.name,
                    "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
                }
            )
        )


def states_of(answer: Answer) -> bytes:
    """The pooled states, as Delta has them. Raises ServingError when the request was stopped."""
    if answer.embedding is None:
        raise ServingError("the request was stopped before its embedding was there")
    return answer.embedding


def _entry(index: int, answer: Answer, body: EmbeddingBody) -> dict[str, Any]:
    """base64 is of the numbers as float32, little-endian."""
    vector = unit(states_of(answer), body.dimensions)
    is_text = body.encoding_format == "base64"
    embedding = base64.b64encode(vector.tobytes()).decode() if is_text else vector.tolist()
    return {"object": "embedding", "index": index, "embedding": embedding}
