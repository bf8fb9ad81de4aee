"""OpenAI's /v1/conversations: items that responses go on from and add to, kept until they are deleted or make room."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvloom.contract.errors import BadRequest, ServingError
from kvloom.server.dialects.ids import new_id
from kvloom.server.dialects.responses.input import InputItem, messages_of
from kvloom.server.dialects.responses.items import HOW, NotKept, kept_items, list_reply, listed, page_of
from kvloom.server.errors import ErrorReply, openai_reply
from kvloom.server.http.body import decode_body
from kvloom.server.http.reply import Endpoint, HttpRequest, Reply
from kvloom.server.keeping.database import Database, Entry, Item, TooLarge
from kvloom.server.keeping.store import ResponseStore

MAX_ITEMS = 20  # added at once
PATH = "/v1/conversations"
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
Json = dict[str, Any]


class ConversationBody(msgspec.Struct, kw_only=True):
    metadata: Metadata | None = None
    items: Annotated[list[Json], Meta(max_length=MAX_ITEMS)] | None = None


class MetadataBody(msgspec.Struct, kw_only=True):
    metadata: Metadata | None


class ItemsBody(msgspec.Struct, kw_only=True):
    items: Annotated[list[Json], Meta(min_length=1, max_length=MAX_ITEMS)]


_conversation_decoder = msgspec.json.Decoder(ConversationBody)
_metadata_decoder = msgspec.json.Decoder(MetadataBody)
_items_decoder = msgspec.json.Decoder(ItemsBody)


class Conversations:
    """Without a `store` all routes say how to have one."""

    def __init__(self, store: ResponseStore | None = None) -> None:
        self._maybe_store = store

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        one, items = f"{PATH}/{{id}}", f"{PATH}/{{id}}/items"
        return (
            Endpoint("POST", PATH, self.create, "A new conversation", (ConversationBody,), parse=self.parse_new),
            Endpoint("GET", one, self.retrieve, "A conversation"),
            Endpoint("POST", one, self.update, "Its metadata replaced", (MetadataBody,), parse=_parse_metadata),
            Endpoint("DELETE", one, self.delete, "A conversation and its items deleted"),
            Endpoint("GET", items, self.items, "Items of a conversation, a page"),
            Endpoint("POST", items, self.add, "Items added to a conversation", (ItemsBody,), parse=self.parse_items),
            Endpoint("GET", f"{items}/{{item}}", self.item, "One item"),
            Endpoint("DELETE", f"{items}/{{item}}", self.remove, "One item deleted"),
        )

    def error_reply(self, error: ServingError) -> ErrorReply:
        return openai_reply(error)

    @property
    def _store(self) -> ResponseStore:
        """Raises BadRequest."""
        if self._maybe_store is None:
            raise BadRequest("conversation", HOW)
        return self._maybe_store

    # -- conversations

    def parse_new(self, request: HttpRequest) -> tuple[Metadata | None, list[Item]]:
        """Raises BadRequest."""
        body = decode_body(_conversation_decoder, request.body or b"{}")
        return body.metadata, self._checked(body.items or [])

    async def create(self, request: HttpRequest, new: tuple[Metadata | None, list[Item]]) -> Reply:
        """Raises ServingError."""
        store, (metadata, items) = self._store, new
        id = f"conv_{new_id()}"
        told = _told(id, int(request.time_s), metadata)
        entry = Entry(id, request.tenant, "conversation", told, items)
        try:
            await store.do(Database.put, entry)
        except TooLarge as error:
            raise BadRequest("items", str(error)) from None
        return Reply(told)

    async def retrieve(self, request: HttpRequest) -> Reply:
        """Raises ServingError."""
        return Reply(await self._body(request))

    async def update(self, request: HttpRequest, body: MetadataBody) -> Reply:
        """Raises ServingError."""
        before = msgspec.json.decode(await self._body(request), type=Json)
        told = _told(before["id"], before["created_at"], body.metadata)
        if not await self._store.do(Database.set_body, request.tenant, "conversation", before["id"], told):
            raise _not_kept(request)
        return Reply(told)

    async def delete(self, request: HttpRequest) -> Reply:
        """Raises ServingError."""
        if not await self._store.do(Database.delete, request.tenant, "conversation", request.path["id"]):
            raise _not_kept(request)
        told = {"id": request.path["id"], "object": "conversation.deleted", "deleted": True}
        return Reply(msgspec.json.encode(told))

    async def _body(self, request: HttpRequest) -> bytes:
        found = await self._store.do(Database.body, request.tenant, "conversation", request.path["id"])
        if found is None:
            raise _not_kept(request)
        return found

    # -- items

    async def items(self, request: HttpRequest) -> Reply:
        """Raises ServingError."""
        page = page_of(request.query)
        try:
            found = await self._store.do(Database.page, request.tenant, "conversation", request.path["id"], page)
        except LookupError as error:
            raise BadRequest("after" if page.after else "before", f"there is no item {error.args[0]!r}") from None
        if found is None:
            raise _not_kept(request)
        return list_reply(found)

    def parse_items(self, request: HttpRequest) -> list[Item]:
        """Raises BadRequest."""
        return self._checked(decode_body(_items_decoder, request.body).items)

    async def add(self, request: HttpRequest, items: list[Item]) -> Reply:
        """The items as they are kept. Raises ServingError."""
        store = self._store
        try:
            is_there = await store.do(Database.append, request.tenant, request.path["id"], items)
        except TooLarge as error:
            raise BadRequest("items", str(error)) from None
        if not is_there:
            raise _not_kept(request)
        return Reply(msgspec.json.encode(listed([body for _, body in items], has_more=False)))

    async def item(self, request: HttpRequest) -> Reply:
        """Raises ServingError."""
        owner, id = request.path["id"], request.path["item"]
        found = await self._store.do(Database.item, request.tenant, "conversation", owner, id)
        if found is None:
            raise NotKept(f"Item with id {id!r} not found in conversation {owner!r}.")
        return Reply(found)

    async def remove(self, request: HttpRequest) -> Reply:
        """The conversation. Raises ServingError."""
        owner, id = request.path["id"], request.path["item"]
        if not await self._store.do(Database.remove_item, request.tenant, owner, id):
            raise NotKept(f"Item with id {id!r} not found in conversation {owner!r}.")
        return Reply(await self._body(request))

    def _checked(self, items: list[Json]) -> list[Item]:
        """The items in the form in which they are stored. Raises BadRequest for items that no response could
        continue.
        """
        try:
            messages_of(msgspec.convert(items, list[InputItem]), "items")
        except msgspec.ValidationError as error:
            raise BadRequest("items", str(error)[:1].lower() + str(error)[1:]) from None
        return kept_items(items)


def _parse_metadata(request: HttpRequest) -> MetadataBody:
    """Raises BadRequest."""
    return decode_body(_metadata_decoder, request.body)


def _told(id: str, created: int, metadata: Metadata | None) -> bytes:
    told = {"id": id, "object": "conversation", "created_at": created, "metadata": metadata or {}}
    return msgspec.json.encode(told)


def _not_kept(request: HttpRequest) -> NotKept:
    return NotKept(f"Conversation with id {request.path['id']!r} not found.")
