"""/v1/embeddings as OpenAI has it: the pooled states of texts or tokens, of length 1."""

import base64
import uuid
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvloom.engine.errors import BadRequest, ServingError
from kvloom.engine.pooling import POOLINGS, unit
from kvloom.engine.request import SamplingParams
from kvloom.server.api.openai_bodies import TokenId, texts_or_ids
from kvloom.server.body import decode_body
from kvloom.server.errors import ErrorReply, openai_reply
from kvloom.server.generation import Answer, Generation, GenerationService
from kvloom.server.models import Models
from kvloom.server.reply import Call, Endpoint, Reply

_NOTHING = SamplingParams(max_tokens=0)


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """`dimensions`: only the first so many numbers of a vector, of length 1 again. `user` has no effect."""

    model: str | None = None
    input: str | list[str | TokenId | list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None
    add_special_tokens: bool | None = None  # of texts; true unless given
    priority: Annotated[int, Meta(ge=0, le=5)] | None = None  # 1 the most urgent; 0 = none
    truncate_prompt_tokens: int | None = None

    def prompts(self, service: GenerationService) -> tuple[tuple[int, ...], ...]:
        """Raises BadRequest."""
        is_special = self.add_special_tokens is not False
        vocab_size = service.engine.info.vocab_size
        found = []
        for item in texts_or_ids(self.input, "input"):
            ids = service.tokenizer.encode(item, is_special) if isinstance(item, str) else item
            if max(ids, default=0) >= vocab_size:
                raise BadRequest("input", f"token id {max(ids)} is outside the vocabulary of {vocab_size}")
            found.append(tuple(ids))
        return tuple(found)

    def check(self, service: GenerationService) -> None:
        """Raises BadRequest for what this server, or this model, does not have."""
        info = service.engine.info
        if self.truncate_prompt_tokens is not None:
            raise BadRequest("truncate_prompt_tokens", "is not supported")
        if info.pooling not in POOLINGS:
            raise BadRequest("model", f"makes its embeddings by {info.pooling}; this server has {', '.join(POOLINGS)}")
        if self.dimensions is not None and self.dimensions > info.hidden_size:
            raise BadRequest("dimensions", f"must be at most {info.hidden_size}, got {self.dimensions}")


_decoder = msgspec.json.Decoder(EmbeddingBody)


class Embeddings:
    """`new_id` makes the ids that the engine knows requests by."""

    def __init__(self, models: Models, new_id: Callable[[], str] = lambda: uuid.uuid4().hex) -> None:
        self._models, self._new_id = models, new_id

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return (Endpoint("POST", "/v1/embeddings", self.embed, "Vectors of texts", (EmbeddingBody,), True),)

    def error_reply(self, error: ServingError) -> ErrorReply:
        return openai_reply(error)

    async def embed(self, call: Call) -> Reply:
        """Raises ServingError."""
        body = decode_body(_decoder, call.body)
        service = self._models.choose(body.model)
        body.check(service)
        generation = Generation(
            f"embd-{self._new_id()}",
            body.prompts(service),
            _NOTHING,
            priority=body.priority or 0,
            tenant=call.tenant,
            pooling=service.engine.info.pooling,
        )
        service.check(generation, "input")
        answers = await service.collect(generation)
        num_tokens = sum(map(len, generation.prompts))
        return Reply(
            msgspec.json.encode(
                {
                    "object": "list",
                    "data": [_entry(place, answer, body) for place, answer in enumerate(answers)],
                    "model": service.name,
                    "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
                }
            )
        )


def _entry(index: int, answer: Answer, body: EmbeddingBody) -> dict[str, Any]:
    """base64 is of the numbers as float32, little-endian."""
    if answer.embedding is None:
        raise ServingError("the request was stopped before its embedding was there")
    vector = unit(answer.embedding, body.dimensions)
    is_text = body.encoding_format == "base64"
    embedding = base64.b64encode(vector.tobytes()).decode() if is_text else vector.tolist()
    return {"object": "embedding", "index": index, "embedding": embedding}
