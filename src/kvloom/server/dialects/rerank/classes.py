"""/classify as in vLLM: a classifier's labels of texts."""

from array import array
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvloom.contract.errors import BadRequest, ServingError
from kvloom.contract.pooling import scores
from kvloom.server.dialects.ids import new_id
from kvloom.server.dialects.openai.bodies import TokenId, texts_or_ids
from kvloom.server.dialects.openai.embeddings import NOTHING, states_of
from kvloom.server.dialects.rerank.routes import counted_reply
from kvloom.server.errors import ErrorReply, openai_reply
from kvloom.server.http.body import decode_body
from kvloom.server.http.job import Job, WholeWriter
from kvloom.server.http.reply import Endpoint, HttpRequest, Reply
from kvloom.server.serving.generation import MAX_EMBEDDINGS, Answer, Generation
from kvloom.server.serving.prompts import check_count, encode_prompts
from kvloom.server.serving.registry import Models
from kvloom.server.serving.service import GenerationService


class ClassifyBody(msgspec.Struct, kw_only=True):
    """`use_activation`: false = the head's own numbers, without sigmoid or softmax. `user` has no effect."""

    model: str | None = None
    input: str | list[str | TokenId | list[TokenId]]
    use_activation: bool | None = None
    add_special_tokens: bool | None = None  # of texts; true unless given
    priority: Annotated[int, Meta(ge=0, le=5)] | None = None  # 1 the most urgent; 0 = none
    truncate_prompt_tokens: int | None = None
    user: str | None = None

    def prompts(self, service: GenerationService) -> tuple[tuple[int, ...], ...]:
        """Raises BadRequest."""
        items = texts_or_ids(self.input, "input")
        check_count(len(items), "input", MAX_EMBEDDINGS)
        limit, is_special = service.input_limit(NOTHING), self.add_special_tokens is not False
        prompts = encode_prompts(service, items, "input", limit, is_special)
        largest, vocab_size = max((max(ids, default=0) for ids in prompts), default=0), service.engine.info.vocab_size
        if largest >= vocab_size:
            raise BadRequest("input", f"token id {largest} is outside the vocabulary of {vocab_size}")
        return prompts


_decoder = msgspec.json.Decoder(ClassifyBody)


class Classify:
    """Errors are OpenAI's."""

    def __init__(self, models: Models) -> None:
        self._models = models

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        def one(path: str) -> Endpoint:
            summary = "A classifier's labels of texts"
            return Endpoint("POST", path, None, summary, (ClassifyBody,), is_generating=True, parse=self.parse)

        return one("/v1/classify"), one("/classify")

    def error_reply(self, error: ServingError) -> ErrorReply:
        return openai_reply(error)

    def parse(self, request: HttpRequest) -> Job:
        """Raises BadRequest, NotFound."""
        body = decode_body(_decoder, request.body)
        if body.truncate_prompt_tokens is not None:
            raise BadRequest("truncate_prompt_tokens", "is not supported; texts are read whole")
        service = self._models.choose(body.model)
        info = service.engine.info
        if not info.labels:
            raise BadRequest("model", "has no classification head, so it has no labels")
        id = f"classify-{new_id()}"
        prompts, priority = body.prompts(service), body.priority or 0
        generation = Generation(id, prompts, NOTHING, priority=priority, tenant=request.tenant, pooling=info.pooling)
        service.check(generation, "input")
        activation = "identity" if body.use_activation is False else info.activation
        return Job(service, generation, _Writer(generation, service, activation, int(request.time_s)))


class _Writer(WholeWriter):
    def __init__(self, generation: Generation, service: GenerationService, activation: str, created: int) -> None:
        super().__init__(generation)
        self._model, self._labels = service.name, service.engine.info.labels
        self._activation, self._created = activation, created

    def whole(self) -> Reply:
        data = [self._entry(index, answer) for index, answer in enumerate(self.answers)]
        about = {"id": self.generation.id, "object": "list", "created": self._created, "model": self._model}
        return counted_reply({**about, "data": data}, self.generation)

    def _entry(self, index: int, answer: Answer) -> dict[str, Any]:
        """`probs`: a number for each label, of which the largest is the text's."""
        probs = scores(array("f", states_of(answer)), self._activation)
        best = max(range(len(probs)), key=probs.__getitem__)
        return {"index": index, "label": self._labels[best], "probs": probs, "num_classes": len(probs)}
