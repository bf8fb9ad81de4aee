"""Judgements: a model is asked whether a document answers a query; the score is how likely it says yes rather than no.

The prompt is that of Qwen3-Reranker, in the model's own chat template.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvloom.contract.errors import BadRequest, ServingError
from kvloom.contract.request import SamplingParams
from kvloom.server.chat.request import ChatRequest, prepare
from kvloom.server.serving.generation import Answer, Generation
from kvloom.server.serving.prompts import check_count, request_limit
from kvloom.server.serving.service import GenerationService

MAX_PAIRS = 1000  # of one request: Cohere's limit
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
_LARGEST = 700.0  # exp of more is no float


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
    service: GenerationService, pairs: Sequence[Pair], order: Order, instruction: str = INSTRUCTION
) -> Generation:
    """A choice for each pair. Raises BadRequest naming the field."""
    check_count(len(pairs), order.field, MAX_PAIRS)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0, logprob_ids=_yes_and_no(service))
    prompts, left = [], request_limit(service)
    for query, document in pairs:
        text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": text}]
        chat = ChatRequest(messages, template_values={"enable_thinking": False}, field=order.field)
        prompts.append(_asked(service, chat, params))
        left -= len(prompts[-1])
        if left < 0:
            raise BadRequest(order.field, f"has more than {request_limit(service)} tokens in all its prompts")
    generation = Generation(order.id, tuple(prompts), params, priority=order.priority, tenant=order.tenant)
    service.check(generation, order.field)
    return generation


def _asked(service: GenerationService, chat: ChatRequest, params: SamplingParams) -> tuple[int, ...]:
    """Raises BadRequest; what the template does not take is no fault of a field of the caller's."""
    try:
        return prepare(service, chat, params).prompt_ids
    except BadRequest as error:
        if error.field != "messages":
            raise
        raise BadRequest("model", f"cannot be asked: {error}") from None


def score(answer: Answer) -> float:
    """Between 0 and 1. Raises ServingError when the request was stopped."""
    if not answer.logprobs:
        raise ServingError("the request was stopped before its score was there")
    *_, (_, yes), (_, no) = answer.logprobs[0].top
    return 1 / (1 + math.exp(min(no - yes, _LARGEST)))


def _yes_and_no(service: GenerationService) -> tuple[int, int]:
    """The first tokens of both answers. Raises BadRequest when they are the same."""
    yes, no = (service.tokenizer.encode(text, add_special_tokens=False)[:1] for text in ("yes", "no"))
    if not yes or not no or yes == no:
        raise BadRequest("model", "has no token that tells yes from no")
    return yes[0], no[0]
