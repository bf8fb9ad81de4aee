"""/v1/decisions (OpenAI, SGLang) and /v1/systemone (TypeSafe, Ollama, llama.cpp, LocalAI)."""

from typing import Any, Protocol

import msgspec

from kvloom.contract.errors import BadRequest, ServingError
from kvloom.server.chat.asking import Asked, Order, asked
from kvloom.server.dialects.decisions import openai, systemone, wording
from kvloom.server.dialects.decisions.odds import logprob_of
from kvloom.server.dialects.ids import new_id
from kvloom.server.errors import ErrorReply, openai_reply
from kvloom.server.http.body import decode_body
from kvloom.server.http.job import Job, WholeWriter
from kvloom.server.http.reply import Endpoint, HttpRequest, Reply
from kvloom.server.serving.generation import Answer
from kvloom.server.serving.registry import Models

Body = openai.DecisionsBody | systemone.SystemOneBody
_openai_decoder = msgspec.json.Decoder(openai.DecisionsBody)


class UsageOf(Protocol):
    """Of tokens of the prompt, and how many of them were found computed."""

    def __call__(self, num_tokens: int, num_cached: int) -> dict[str, Any]: ...


class Decisions:
    """Errors are OpenAI's."""

    def __init__(self, models: Models) -> None:
        self._models = models

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        def one(path: str, body: type, parse: Any) -> Endpoint:
            summary = "Predicates, choices and scores over one input"
            return Endpoint("POST", path, None, summary, (body,), is_generating=True, parse=parse)

        return (
            one("/v1/decisions", openai.DecisionsBody, self.decisions),
            one("/v1/systemone", systemone.SystemOneBody, self.systemone),
        )

    def error_reply(self, error: ServingError) -> ErrorReply:
        return openai_reply(error)

    def decisions(self, request: HttpRequest) -> Job:
        """Raises BadRequest, NotFound."""
        return self._job(decode_body(_openai_decoder, request.body), request, "input", openai.usage_of)

    def systemone(self, request: HttpRequest) -> Job:
        """Raises BadRequest, NotFound."""
        return self._job(systemone.read(request.body), request, "state", systemone.usage_of)

    def _job(self, body: Body, request: HttpRequest, field: str, usage_of: UsageOf) -> Job:
        if body.stream:
            raise BadRequest("stream", "is not supported: the answers come together")
        service = self._models.choose(body.model)
        service.check_writes("model")
        order = Order(f"decision-{new_id()}", field, request.tenant, body.priority or 0)
        questions = body.asked()
        found = asked(service, wording.framed(body.content()), questions, order)
        counts = [len(question.labels) for question in questions]
        return Job(service, found.generation, _Writer(body, service.name, found, counts, usage_of))


class _Writer(WholeWriter):
    """`counts`: of the labels of each question."""

    def __init__(self, body: Body, model: str, found: Asked, counts: list[int], usage_of: UsageOf) -> None:
        self.generation, self._num_tokens = found
        self.answers = [Answer(()) for _ in self.generation.tails]
        self._body, self._model, self._counts, self._usage_of = body, model, counts, usage_of

    def whole(self) -> Reply:
        logprobs = iter([logprob_of(answer) for answer in self.answers])
        answers = self._body.answers([[next(logprobs) for _ in range(count)] for count in self._counts])
        num_computed = self.generation.num_request_tokens - sum(answer.num_cached_tokens for answer in self.answers)
        usage = self._usage_of(self._num_tokens, max(0, self._num_tokens - num_computed))
        return Reply(msgspec.json.encode({"model": self._model, "answers": answers, "usage": usage}))
