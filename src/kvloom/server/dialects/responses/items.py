"""Items of responses and conversations as they are kept and listed: whole, with ids, in OpenAI's form."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from kvloom.contract.errors import BadRequest
from kvloom.contract.numbers import whole
from kvloom.server.dialects.ids import new_id
from kvloom.server.dialects.responses.input import REFERENCE, InputItem
from kvloom.server.errors import NoRoute
from kvloom.server.http.reply import Reply
from kvloom.server.keeping.database import Item, Page

Json = dict[str, Any]
HOW = "is not supported: nothing is kept; start the server with --response-store FILE to keep responses"
MAX_LIMIT, DEFAULT_LIMIT = 100, 20
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_OTHER = "item"  # begins the ids of all other items
_encode = msgspec.json.Encoder().encode
_item_decoder = msgspec.json.Decoder(InputItem)


class NotKept(NoRoute):
    """There is no such response, conversation or item, or it belongs to another tenant."""


def kept_items(given: str | Sequence[Json]) -> list[Item]:
    """Items as a client gave them, with ids of ours. They have passed messages_of."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [kept_item(_whole(item, new_id())) for item in items]


def kept_item(item: Json) -> Item:
    return item["id"], _encode(item)


def in_place(given: str | list[Json], referred: Sequence[bytes]) -> str | list[Json]:
    """Items as given, with those in place that are only named."""
    found = iter(referred)
    if isinstance(given, str):
        return given
    return [msgspec.json.decode(next(found), type=Json) if item.get("type") == REFERENCE else item for item in given]


def read_item(data: bytes) -> InputItem:
    """A kept item as input again."""
    return _item_decoder.decode(data)


def _whole(given: Json, id: str) -> Json:
    kind = given.get("type") or "message"
    item = {**given, "id": f"{_PREFIXES.get(kind, _OTHER)}_{id}", "type": kind}
    if kind == "reasoning":
        return {"summary": [], **item}
    if kind == "message" and isinstance(given.get("content"), str):
        part: Json = {"type": "input_text", "text": given["content"]}
        if given["role"] == "assistant":
            part = {"type": "output_text", "text": given["content"], "annotations": []}
        item["content"] = [part]
    return {"status": "completed", **item}


def listed(data: Iterable[bytes], has_more: bool) -> Json:
    """A page of items."""
    items = [msgspec.json.decode(item, type=Json) for item in data]
    ids = [item["id"] for item in items]
    return {
        "object": "list",
        "data": items,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": has_more,
    }


def list_reply(page: tuple[list[bytes], bool]) -> Reply:
    return Reply(_encode(listed(*page)))


def page_of(query: Mapping[str, str]) -> Page:
    """The page that a query asks for. Raises BadRequest."""
    limit, order = query.get("limit", str(DEFAULT_LIMIT)), query.get("order", "desc")
    most = whole(limit, MAX_LIMIT)
    if not most:
        raise BadRequest("limit", f"must be between 1 and {MAX_LIMIT}, got {limit[:40]}")
    if order not in ("asc", "desc"):
        raise BadRequest("order", f'must be "asc" or "desc", got {order[:40]!r}')
    return Page(most, order == "asc", query.get("after", ""), query.get("before", ""))
