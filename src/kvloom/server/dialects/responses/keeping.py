"""Loads what a response continues, and stores it at its end: between /v1/responses and its store."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from kvloom.contract.errors import BadRequest, ServingError
from kvloom.server.dialects.responses.bodies import ResponsesBody
from kvloom.server.dialects.responses.input import references_of
from kvloom.server.dialects.responses.items import HOW, kept_item, read_item
from kvloom.server.dialects.responses.shapes import ResponseWriter
from kvloom.server.http.job import Job
from kvloom.server.keeping.database import Database, Entry, Item, TooLarge
from kvloom.server.keeping.store import ResponseStore, StoreFailed

log = logging.getLogger(__name__)

MAX_PAST_BYTES = 8 << 20  # of the items that a response continues
_encode = msgspec.json.Encoder().encode


class _Output(msgspec.Struct):
    output: list[msgspec.Raw]


_output_decoder = msgspec.json.Decoder(_Output)


class PreviousNotFound(BadRequest):
    """`previous_response_id` names no stored response."""

    code = "previous_response_not_found"


@dataclass(frozen=True, slots=True)
class ToKeep:
    """What of one response is to be kept. `items`: its input, which a conversation takes too; `is_kept`: the response
    as well."""

    items: list[Item]
    is_kept: bool
    parent: str = ""
    conversation: str = ""


@dataclass(frozen=True, slots=True)
class Keeping:
    """Where one response goes."""

    store: ResponseStore
    tenant: str
    what: ToKeep

    async def keep(self, response: dict[str, Any]) -> None:
        """An answer is given whether or not it can be kept: then it says `store` false, and the log says why."""
        what, entry = self.what, None
        if what.is_kept:
            body = _encode(response)
            entry = Entry(response["id"], self.tenant, "response", body, what.items, what.parent)
        try:
            if what.conversation:
                added = [*what.items, *map(kept_item, response["output"])]
                if not await self.store.do(Database.put_answer, entry, self.tenant, what.conversation, added):
                    log.warning("%s: its conversation %s is gone", response["id"], what.conversation)
            elif entry is not None:
                await self.store.do(Database.put, entry)
        except (StoreFailed, TooLarge) as error:
            log.warning("%s is not kept: %s", response["id"], error)
            response["store"] = False


class Run:
    """One response under way, beside its job: found by its id meanwhile, and kept when it has ended.

    A response whose client disconnects is stored as it is then, cancelled.
    """

    def __init__(self, running: dict[str, "Run"], job: Job, writer: ResponseWriter, keeping: Keeping | None) -> None:
        self.job, self.writer = job, writer
        self._running, self._keeping = running, keeping

    async def __aenter__(self) -> "Run":
        self._running[self.job.generation.id] = self
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        """A response that has begun absorbs a ServingError, and becomes a failed one."""
        writer, keeping, is_failed = self.writer, self._keeping, isinstance(error, ServingError)
        try:
            if not writer.has_begun:
                return False
            if isinstance(error, ServingError):
                writer.fail(error)
            elif not writer.has_ended:
                writer.cancel()
            if keeping is not None and (error is None or is_failed):
                await keeping.keep(writer.response)
            elif keeping is not None:
                keeping.store.later(keeping.keep(writer.response))
            return is_failed
        finally:
            del self._running[self.job.generation.id]


class Origin(NamedTuple):
    """What a response goes on from: the id of a response, or else of a conversation. `may_cut`: without the oldest.
    `references`: the input's item_references, their fields and ids.
    """

    previous: str | None
    conversation: str
    may_cut: bool
    references: tuple[tuple[str, str], ...] = ()


class Found(NamedTuple):
    """What the store had, in the order of an Origin: the items before a response's own, and those referred to."""

    past: Sequence[bytes]
    referred: Sequence[bytes]


def origin_of(body: ResponsesBody) -> Origin | None:
    """Raises BadRequest."""
    references = references_of(body.input)
    if body.previous_response_id is None and body.conversation is None and not references:
        return None
    if body.previous_response_id is not None and body.conversation is not None:
        raise BadRequest("previous_response_id", "and conversation are both given; give one")
    return Origin(body.previous_response_id, body.conversation_id, body.truncation == "auto", references)


def found_of(origin: Origin | None, items: Sequence[bytes]) -> Found:
    """`items`: what kept_of returned."""
    num_past = len(items) - (0 if origin is None else len(origin.references))
    return Found(items[:num_past], items[num_past:])


async def kept_of(store: ResponseStore | None, tenant: str, origin: Origin) -> list[bytes]:
    """The items before a response's own as they are kept, oldest first; then those that it refers to. Raises
    BadRequest, StoreFailed.
    """
    if store is None and origin.references:
        field, id = origin.references[0]
        problem = (
            f"refers to the item {id!r}, but this server keeps none: give the item itself, as clients do with "
            "`store: false`, or start the server with --response-store FILE"
        )
        raise BadRequest(field, problem)
    is_alone = origin.previous is None and not origin.conversation
    past = [] if is_alone else await _past_items(store, tenant, origin)
    return [*past, *[await _referred(store, tenant, *each) for each in origin.references if store is not None]]


async def _referred(store: ResponseStore, tenant: str, field: str, id: str) -> bytes:
    given, bodies = await store.do(Database.naming, tenant, id)
    if given is not None:
        return given
    for body in bodies:
        for item in map(bytes, _output_decoder.decode(body).output):
            if read_item(item).id == id:
                return item
    raise BadRequest(field, f"Item with id {id!r} not found.")


async def _past_items(store: ResponseStore | None, tenant: str, origin: Origin) -> list[bytes]:
    field = "conversation" if origin.previous is None else "previous_response_id"
    if store is None:
        raise BadRequest(field, HOW)
    if origin.previous is not None:
        items, is_all = await _chain(store, tenant, origin.previous)
    else:
        items, is_all = await _conversation(store, tenant, origin.conversation)
    if not is_all and not origin.may_cut:
        problem = f'leads to more than {MAX_PAST_BYTES} bytes; with truncation "auto" the oldest items are left out'
        raise BadRequest(field, problem)
    return items


async def _chain(store: ResponseStore, tenant: str, id: str) -> tuple[list[bytes], bool]:
    try:
        found = await store.do(Database.chain, tenant, id, MAX_PAST_BYTES)
    except LookupError as error:
        text = f"Response with id {error.args[0]!r}, which {id!r} goes on from, is not kept any more."
        raise PreviousNotFound("previous_response_id", text) from None
    if found is None:
        raise PreviousNotFound("previous_response_id", f"Previous response with id {id!r} not found.")
    chain, is_all = found
    items: list[bytes] = []
    for given, body in reversed(chain):
        items += given
        items += map(bytes, _output_decoder.decode(body).output)
    return items, is_all


async def _conversation(store: ResponseStore, tenant: str, id: str) -> tuple[list[bytes], bool]:
    found = await store.do(Database.latest, tenant, id, MAX_PAST_BYTES)
    if found is None:
        raise BadRequest("conversation", f"Conversation with id {id!r} not found.")
    items, is_all = found
    return items[::-1], is_all
