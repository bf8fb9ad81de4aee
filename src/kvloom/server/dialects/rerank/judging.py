"""Judgements: how well a document answers a query.

A classifier of one label reads both, and its head gives the score. Any other model is asked, and the score is how
likely it says yes rather than no; the prompt is that of Qwen3-Reranker, in the model's own chat template.
"""

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from kvloom.contract.errors import BadRequest, ServingError
from kvloom.contract.pooling import scores
from kvloom.contract.sampling import SamplingParams
from kvloom.server.chat.place import DIRECT
from kvloom.server.chat.request import ChatRequest, lead, prepare
from kvloom.server.serving.generation import Answer, Generation
from kvloom.server.serving.prompts import check_count, check_fits, check_length, request_limit
from kvloom.server.serving.service import GenerationService

MAX_PAIRS = 1000  # of one request: Cohere's limit
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
NOTHING = SamplingParams(max_tokens=0)
_LARGEST = 700.0  # exp of larger numbers overflows


class Pair(NamedTuple):
    query: str
    document: str


class Order(NamedTuple):
    """Of one request: `id` and `field`, what errors name; who asks and how urgently."""

    id: str
    field: str
    tenant: str
    priority: int


def judgement(
    service: GenerationService, pairs: Sequence[Pair], order: Order, instruction: str | None = None
) -> Generation:
    """A choice for each pair; `instruction`: None = INSTRUCTION. Raises BadRequest naming the field."""
    check_count(len(pairs), order.field, MAX_PAIRS)
    if service.engine.info.labels:
        return _read_together(service, pairs, order, instruction)
    service.check_writes("model")
    instruction = INSTRUCTION if instruction is None else instruction
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0, logprob_ids=_yes_and_no(service))
    prompts, left = [], request_limit(service)
    for query, document in pairs:
        text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": text}]
        chat = ChatRequest(messages, template_values=DIRECT, is_direct=True, field=order.field)
        prompts.append(_asked(service, chat, params))
        left -= len(prompts[-1])
        if left < 0:
            raise BadRequest(order.field, f"has more than {request_limit(service)} tokens in all its prompts")
    generation = Generation(order.id, tuple(prompts), params, priority=order.priority, tenant=order.tenant)
    service.check(generation, order.field)
    return generation


def _read_together(
    service: GenerationService, pairs: Sequence[Pair], order: Order, instruction: str | None
) -> Generation:
    """Raises BadRequest."""
    info = service.engine.info
    if len(info.labels) != 1:
        raise BadRequest("model", f"scores by one label; this one has {len(info.labels)}: ask /classify")
    if instruction is not None:
        raise BadRequest("instruction", "is not supported by this model, whose classification head takes none")
    prompts, seconds, left, limit = [], [], request_limit(service), service.input_limit(NOTHING)
    for query, document in pairs:
        for text in (query, document):
            check_fits(service, text, order.field, limit)
        ids, second = service.tokenizer.encode_pair(query, document)
        check_length(service, ids, order.field, limit)
        prompts.append(tuple(ids))
        seconds.append(second)
        left -= len(ids)
        if left < 0:
            raise BadRequest(order.field, f"has more than {request_limit(service)} tokens in all its prompts")
    generation = Generation(
        order.id,
        tuple(prompts),
        NOTHING,
        priority=order.priority,
        tenant=order.tenant,
        pooling=info.pooling,
        seconds=tuple(seconds),
    )
    service.check(generation, order.field)
    return generation


def _asked(service: GenerationService, chat: ChatRequest, params: SamplingParams) -> tuple[int, ...]:
    """Raises BadRequest; a chat that the template refuses is not reported for one of the caller's fields."""
    try:
        return prepare(service, chat, params).prompt_ids
    except BadRequest as error:
        if error.field != "messages":
            raise
        raise BadRequest("model", f"cannot be asked: {error}") from None


def score(answer: Answer, activation: str = "") -> float:
    """Between 0 and 1, or the raw number of a head without an activation; `activation`: of RankInfo.

    Raises ServingError when the request was stopped.
    """
    if activation and answer.embedding is not None:
        return scores(array("f", answer.embedding)[:1], activation)[0]
    if not answer.logprobs:
        raise ServingError("the request was stopped before its score was there")
    *_, (_, yes), (_, no) = answer.logprobs[0].top
    return 1 / (1 + math.exp(min(no - yes, _LARGEST)))


def _yes_and_no(service: GenerationService) -> tuple[int, int]:
    """The first tokens of both answers, as the model begins them. Raises BadRequest when they are the same."""
    space = lead(service).space
    yes, no = (service.tokenizer.encode_inside(space + text)[:1] for text in ("yes", "no"))
    if not yes or not no or yes == no:
        raise BadRequest("model", "has no token that tells yes from no")
    return yes[0], no[0]
