"""The served models in OpenAI's form and, for requests with its header, Anthropic's."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from kvloom.contract.errors import BadRequest, ServingError
from kvloom.contract.numbers import whole
from kvloom.server.errors import anthropic_reply
from kvloom.server.http.reply import HttpRequest, Reply
from kvloom.server.serving.pictures.service import PictureService
from kvloom.server.serving.registry import Models
from kvloom.server.serving.service import GenerationService

OWNER = "MindIE Server"
ANTHROPIC_HEADER = "anthropic-version"
_MAX_PAGE, _PAGE = 1000, 20
Json = dict[str, Any]


def models_reply(models: Models, request: HttpRequest, created: int) -> Reply:
    """All of them, or the one that the path names. `created`: Unix time. Raises NotFound in OpenAI's dialect."""
    name = request.path.get("name", "")  # "" of a path that ends with /
    if ANTHROPIC_HEADER in request.headers:
        return _anthropic_reply(models, name, request.query, created)
    of_pictures = {each.name: picture_card(each, created) for each in models.pictures}
    if name:
        return Reply(msgspec.json.encode(of_pictures.get(name) or openai_card(models.get(name), created)))
    cards = [*(openai_card(service, created) for service in models.served), *of_pictures.values()]
    return Reply(msgspec.json.encode({"object": "list", "data": cards}))


def openai_card(service: GenerationService, created: int) -> Json:
    """`task`: what a model does that generates no text."""
    info, task = service.engine.info, {}
    if "generation" in info.lacks:
        task = {"task": "text-classification" if info.labels else "feature-extraction"}
    return {
        "id": service.name,
        "object": "model",
        "created": created,
        "owned_by": OWNER,
        "root": service.root,
        "parent": service.parent,
        "max_model_len": service.engine.max_seq_len,
        **task,
    }


def picture_card(service: PictureService, created: int) -> Json:
    """`task`: distinguishes it from a language model."""
    card = {"id": service.name, "object": "model", "created": created, "owned_by": OWNER, "root": service.name}
    return {**card, "parent": None, "task": "text-to-image"}


def anthropic_card(service: GenerationService, created: int) -> Json:
    return {
        "type": "model",
        "id": service.name,
        "display_name": service.name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": service.max_input_tokens,
        "max_tokens": service.max_output_tokens,
    }


def _anthropic_reply(models: Models, name: str, query: Mapping[str, str], created: int) -> Reply:
    try:
        told = anthropic_card(models.get(name), created) if name else _page(models.served, query, created)
    except ServingError as error:
        reply = anthropic_reply(error)
        return Reply(reply.body, status=reply.status, headers=reply.headers)
    return Reply(msgspec.json.encode(told))


def _page(served: Sequence[GenerationService], query: Mapping[str, str], created: int) -> Json:
    """`limit` of them, after or before the one that the query names. Raises BadRequest."""
    limit = whole(query.get("limit", str(_PAGE)), _MAX_PAGE)
    if not limit:
        raise BadRequest("limit", f"must be between 1 and {_MAX_PAGE}")
    names = [service.name for service in served]
    begin, end = 0, len(names)
    if "after_id" in query:
        begin = _index(names, query, "after_id") + 1
    if "before_id" in query:
        end = _index(names, query, "before_id")
        begin = max(begin, end - limit)
    shown = served[begin : min(end, begin + limit)]
    cards = [anthropic_card(service, created) for service in shown]
    has_more = begin > 0 if "before_id" in query else begin + len(shown) < len(names)
    ids = [card["id"] for card in cards] or [None]
    return {"data": cards, "has_more": has_more, "first_id": ids[0], "last_id": ids[-1]}


def _index(names: Sequence[str], query: Mapping[str, str], field: str) -> int:
    if query[field] not in names:
        raise BadRequest(field, f"{query[field][:80]!r} is none of the models")
    return names.index(query[field])
