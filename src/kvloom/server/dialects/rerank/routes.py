"""/rerank (Jina, Cohere, vLLM) and /score (vLLM)."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvloom.contract.errors import BadRequest, ServingError
from kvloom.server.dialects.ids import new_id
from kvloom.server.dialects.rerank.judging import Order, Pair, judgement, score
from kvloom.server.errors import ErrorReply, openai_reply
from kvloom.server.http.body import decode_body
from kvloom.server.http.job import Job, WholeWriter
from kvloom.server.http.reply import Endpoint, HttpRequest, Reply
from kvloom.server.serving.generation import Generation
from kvloom.server.serving.registry import Models
from kvloom.server.serving.service import GenerationService

_COHERES = "/v2/rerank"  # which answers without the documents unless they are asked for
Texts = Annotated[list[str], Meta(min_length=1)]


class Document(msgspec.Struct, forbid_unknown_fields=True):
    text: str


class RerankBody(msgspec.Struct, kw_only=True):
    """`top_n`: number of results, best first; 0 = all. `instruction`: the task of the query, for the prompt."""

    model: str | None = None
    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1)]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    priority: Annotated[int, Meta(ge=0, le=5)] | None = None
    max_tokens_per_doc: int | None = None
    max_chunks_per_doc: int | None = None
    rank_fields: list[str] | None = None
    truncate_prompt_tokens: int | None = None

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


class ScoreBody(msgspec.Struct, kw_only=True):
    """Each text of `text_2` for the one of `text_1`, or for that at the same position."""

    model: str | None = None
    text_1: str | Texts
    text_2: str | Texts
    instruction: str | None = None
    priority: Annotated[int, Meta(ge=0, le=5)] | None = None
    truncate_prompt_tokens: int | None = None

    def pairs(self) -> list[Pair]:
        """Raises BadRequest."""
        first, second = ([given] if isinstance(given, str) else given for given in (self.text_1, self.text_2))
        if len(first) not in (1, len(second)):
            raise BadRequest("text_1", f"must be one text or as many as text_2 has, {len(second)}; got {len(first)}")
        return [Pair(*both) for both in zip(first * len(second) if len(first) == 1 else first, second, strict=True)]


_rerank_decoder, _score_decoder = msgspec.json.Decoder(RerankBody), msgspec.json.Decoder(ScoreBody)
_REFUSED = {
    "max_tokens_per_doc": "is not supported; documents are judged whole",
    "max_chunks_per_doc": "is not supported; documents are judged whole",
    "truncate_prompt_tokens": "is not supported; documents are judged whole",
    "rank_fields": "is not supported; give each document as one text",
}


class Rerank:
    """Errors are OpenAI's, as those of the server that has these routes."""

    def __init__(self, models: Models) -> None:
        self._models = models

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        def reranking(path: str) -> Endpoint:
            def parse(request: HttpRequest) -> Job:
                return self.rerank(request, has_documents=path != _COHERES)

            summary = "Documents by how well they answer a query"
            return Endpoint("POST", path, None, summary, (RerankBody,), is_generating=True, parse=parse)

        def scoring(path: str) -> Endpoint:
            summary = "How well texts answer others"
            return Endpoint("POST", path, None, summary, (ScoreBody,), is_generating=True, parse=self.score)

        return (*map(reranking, ("/v1/rerank", "/rerank", _COHERES)), *map(scoring, ("/v1/score", "/score")))

    def error_reply(self, error: ServingError) -> ErrorReply:
        return openai_reply(error)

    def rerank(self, request: HttpRequest, has_documents: bool) -> Job:
        """`has_documents`: where the body does not say. Raises BadRequest, NotFound."""
        body = decode_body(_rerank_decoder, request.body)
        _refuse(body)
        service = self._models.choose(body.model)
        texts = body.texts
        order = Order(f"rerank-{new_id()}", "documents", request.tenant, body.priority or 0)
        pairs = [Pair(body.query, text) for text in texts]
        generation = judgement(service, pairs, order, body.instruction)
        is_told = has_documents if body.return_documents is None else body.return_documents
        kind = _RerankWriter if has_documents else _CoheresWriter
        writer = kind(generation, service, body.top_n or len(texts), texts if is_told else None)
        return Job(service, generation, writer)

    def score(self, request: HttpRequest) -> Job:
        """Raises BadRequest, NotFound."""
        body = decode_body(_score_decoder, request.body)
        _refuse(body)
        service = self._models.choose(body.model)
        order = Order(f"score-{new_id()}", "text_2", request.tenant, body.priority or 0)
        generation = judgement(service, body.pairs(), order, body.instruction)
        return Job(service, generation, _ScoreWriter(generation, service, int(request.time_s)))


def _refuse(body: RerankBody | ScoreBody) -> None:
    for name, problem in _REFUSED.items():
        if getattr(body, name, None) is not None:
            raise BadRequest(name, problem)


class _Scores(WholeWriter):
    def __init__(self, generation: Generation, service: GenerationService) -> None:
        super().__init__(generation)
        self._model, self._activation = service.name, service.engine.info.activation

    @property
    def _found(self) -> list[float]:
        """Raises ServingError."""
        return [score(answer, self._activation) for answer in self.answers]


class _RerankWriter(_Scores):
    def __init__(
        self, generation: Generation, service: GenerationService, num_results: int, texts: list[str] | None
    ) -> None:
        """`texts`: the documents' texts if they are part of the results."""
        super().__init__(generation, service)
        self._num_results, self._texts = num_results, texts

    def whole(self) -> Reply:
        """Best first, of equal ones the earlier."""
        scores = self._found
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._num_results]
        results = [self._result(index, scores[index]) for index in best]
        about = {"id": self.generation.id, "model": self._model, **self._meta()}
        return counted_reply({**about, "results": results}, self.generation)

    def _meta(self) -> dict[str, Any]:
        return {}

    def _result(self, index: int, score: float) -> dict[str, Any]:
        told = {} if self._texts is None else {"document": {"text": self._texts[index]}}
        return {"index": index, **told, "relevance_score": score}


class _CoheresWriter(_RerankWriter):
    def _meta(self) -> dict[str, Any]:
        """What Cohere's clients read beside the results."""
        tokens = {"input_tokens": self.generation.num_prompt_tokens, "output_tokens": 0}
        return {"meta": {"api_version": {"version": "2"}, "tokens": tokens}}


class _ScoreWriter(_Scores):
    def __init__(self, generation: Generation, service: GenerationService, created: int) -> None:
        super().__init__(generation, service)
        self._created = created

    def whole(self) -> Reply:
        data = [{"index": index, "object": "score", "score": found} for index, found in enumerate(self._found)]
        about = {"id": self.generation.id, "object": "list", "created": self._created, "model": self._model}
        return counted_reply({**about, "data": data}, self.generation)


def counted_reply(body: dict[str, Any], generation: Generation) -> Reply:
    num_tokens = generation.num_prompt_tokens
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return Reply(msgspec.json.encode({**body, "usage": usage}))
