"""Many questions about one input: the prompt up to the questions, which all of them share, and what stands behind each.

The answer to a question is one of its labels. How likely each label is, as what the model writes at the place of the
answer, follows from the log-probabilities of its tokens and of the end behind them.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvloom.contract.errors import BadRequest
from kvloom.contract.images import Sight
from kvloom.contract.sampling import SamplingParams
from kvloom.server.chat.content import Content, joined
from kvloom.server.chat.place import DIRECT
from kvloom.server.chat.request import ChatRequest, lead, rendered
from kvloom.server.serving.generation import MAX_EMBEDDINGS, Generation, Tail
from kvloom.server.serving.prompts import check_fits, check_length, encode_marked
from kvloom.server.serving.service import GenerationService
from kvloom.server.serving.vision.seen import Look, seen_of

MAX_LABELS = MAX_EMBEDDINGS  # labels of all questions of a request
MAX_SCORED_TOKENS = 2_000_000  # tokens of all labels of a request, each with its question and the input before it
_SPLIT = "\uf8ff\ue0c3\uf8fe"  # put behind the input, in order to find its end in the rendered prompt


class Question(NamedTuple):
    """`text` follows the input. `field`: how errors call the question."""

    text: str
    labels: tuple[str, ...]
    field: str


class Order(NamedTuple):
    """Of one request: its `id`, who asks and how urgently; `field`: how errors call the input."""

    id: str
    field: str
    tenant: str
    priority: int


class Asked(NamedTuple):
    """`generation` has a choice for each label of each question, in order. `num_tokens`: of its prompt, with the input
    and each question counted once.
    """

    generation: Generation
    num_tokens: int


class _Around(NamedTuple):
    """The prompt around a question."""

    before: tuple[int, ...]
    behind: tuple[int, ...]
    space: str  # see place.Lead
    sight: Sight | None


def asked(service: GenerationService, content: Content, questions: Sequence[Question], order: Order) -> Asked:
    """Raises BadRequest that names the field, NotSeen."""
    num_labels = sum(len(question.labels) for question in questions)
    if num_labels > MAX_LABELS:
        raise BadRequest("questions", f"have {num_labels} possible answers together; at most {MAX_LABELS} are judged")
    around = _around(service, content, order.field)
    tails: list[Tail] = []
    num_tokens = len(around.before)
    left = MAX_SCORED_TOKENS
    for question in questions:
        before = (*_inside(service, question.text, question.field), *around.behind)
        num_tokens += len(before)
        for label in question.labels:
            ids = _inside(service, around.space + label, question.field)
            tails.append(Tail(before + ids, len(ids)))
            num_tokens += len(ids)
            left -= len(around.before) + len(before) + len(ids)
        if left < 0:
            problem = f"have more than {MAX_SCORED_TOKENS} tokens in all their answers, each with the input before it"
            raise BadRequest("questions", problem)
    generation = Generation(
        order.id, (around.before,), _params(service), priority=order.priority, tenant=order.tenant,
        sight=around.sight, tails=tuple(tails),
    )  # fmt: skip
    service.check(generation, order.field)
    return Asked(generation, num_tokens)


def _params(service: GenerationService) -> SamplingParams:
    ends = tuple(sorted(id for id in service.tokenizer.eos_ids if 0 <= id < service.engine.info.vocab_size))
    return SamplingParams(
        temperature=0, max_tokens=0, logprobs=0 if ends else None, logprob_ids=ends, prompt_logprobs=0
    )


def _around(service: GenerationService, content: Content, field: str) -> _Around:
    """Raises BadRequest."""
    messages = [{"role": "user", "content": joined(content, _SPLIT)}]
    chat = ChatRequest(messages, template_values=DIRECT, is_direct=True, field=field)
    try:
        marked, sources = rendered(service, chat)
    except BadRequest as error:
        if error.field != "messages":
            raise
        raise BadRequest("model", f"cannot be asked: {error}") from None
    before, is_shown, behind = marked.text.rpartition(_SPLIT)
    if not is_shown:
        raise BadRequest("model", "cannot be asked: its chat template leaves out what the user says")
    limit = service.input_limit(_params(service))
    ids = encode_marked(service, marked._replace(text=before), field, limit)
    sight = None
    if sources:
        seen = seen_of(Look(service, ids, sources))
        check_length(service, seen.prompt_ids, field, limit)
        ids, sight = seen.prompt_ids, seen.sight
    following = tuple(service.tokenizer.encode_inside(behind, is_plain=False))
    return _Around(ids, following, lead(service).space, sight)


def _inside(service: GenerationService, text: str, field: str) -> tuple[int, ...]:
    """Tokens of a text within the prompt. Raises PromptTooLong."""
    limit = service.engine.max_seq_len
    check_fits(service, text, field, limit)
    ids = tuple(service.tokenizer.encode_inside(text, is_plain=not service.card.parses_special_text))
    check_length(service, ids, field, limit)
    return ids
