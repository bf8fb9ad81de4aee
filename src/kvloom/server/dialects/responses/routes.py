"""OpenAI's /v1/responses over the same chat, whole or as its sequence of events; kept where the server has a store."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from kvloom.contract.errors import BadRequest, ServingError
from kvloom.contract.sampling import SamplingParams
from kvloom.server.chat.fit import prepare_fitting
from kvloom.server.chat.request import prepare
from kvloom.server.dialects.ids import new_id
from kvloom.server.dialects.responses.bodies import ResponsesBody
from kvloom.server.dialects.responses.input import InputItem
from kvloom.server.dialects.responses.items import HOW, NotKept, in_place, kept_items, list_reply, page_of, read_item
from kvloom.server.dialects.responses.keeping import Keeping, Origin, Run, ToKeep, found_of, kept_of, origin_of
from kvloom.server.dialects.responses.shapes import ResponseWriter, response_object
from kvloom.server.dialects.sampling import advised
from kvloom.server.errors import ErrorReply, NoRoute, openai_reply
from kvloom.server.http.body import decode_body
from kvloom.server.http.job import Job, JobAndMore, answer
from kvloom.server.http.reply import Endpoint, Fetch, HttpRequest, Reply, job_route
from kvloom.server.keeping.database import Database
from kvloom.server.keeping.store import ResponseStore
from kvloom.server.serving.generation import Generation
from kvloom.server.serving.registry import Models

PATH = "/v1/responses"


class _Given(msgspec.Struct):
    """The input as given, which is stored."""

    input: str | list[dict[str, Any]]


_decoder = msgspec.json.Decoder(ResponsesBody)
_given_decoder = msgspec.json.Decoder(_Given)


@dataclass(frozen=True, slots=True)
class _Parsed(JobAndMore):
    writer: ResponseWriter  # the job's
    what: ToKeep | None  # None = nothing


class Responses:
    """Without a `store` nothing is kept."""

    def __init__(self, models: Models, store: ResponseStore | None = None) -> None:
        self._models, self._store = models, store
        self._running: dict[str, Run] = {}  # by the id of the response

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        one = f"{PATH}/{{id}}"
        return (
            replace(job_route(PATH, self.parse, "Responses", ResponsesBody), fetch=self.fetch, answer=self.respond),
            Endpoint(
                *("POST", f"{PATH}/input_tokens", None, "Tokens of a response's prompt", (ResponsesBody,)),
                parse=self.count,
                fetch=self.fetch,
            ),
            Endpoint("POST", f"{PATH}/compact", _refuse_compact, "OpenAI: refused"),
            Endpoint("GET", one, self.retrieve, "A response that is kept, or runs"),
            Endpoint("DELETE", one, self.delete, "A kept response deleted"),
            Endpoint("POST", f"{one}/cancel", self.cancel, "End a running response"),
            Endpoint("GET", f"{one}/input_items", self.input_items, "The input of a kept response, a page"),
        )

    def error_reply(self, error: ServingError) -> ErrorReply:
        return openai_reply(error)

    # -- answers

    def parse(self, request: HttpRequest) -> _Parsed | Fetch:
        """Raises BadRequest, NotFound."""
        read = _read(request)
        if isinstance(read, Fetch):
            return read
        body, past, referred = read
        service = self._models.choose(body.model)
        body.check()
        params = advised(body.params(self._models.options.default_max_tokens), body, service)
        body.temperature, body.top_p = params.temperature, params.top_p  # shown in the response
        if body.truncation == "auto":
            chat = prepare_fitting(service, body.chat(past), params, service.engine.max_seq_len)
        else:
            chat = prepare(service, body.chat(past), params)
        id, priority = f"resp_{new_id()}", body.priority or 0
        generation = Generation(
            id, (chat.prompt_ids,), chat.params, priority=priority, tenant=request.tenant, sight=chat.sight
        )
        service.check(generation, "input")
        what = self._to_keep(body, request.body, referred)
        is_kept = what is not None and what.is_kept
        response = response_object(id, int(request.time_s), service.name, body, is_kept)
        writer = ResponseWriter(response, service, len(chat.prompt_ids), chat.output(), body.offered(past))
        return _Parsed(Job(service, generation, writer, bool(body.stream)), writer, what)

    def count(self, request: HttpRequest) -> Reply | Fetch:
        """Raises BadRequest, NotFound."""
        read = _read(request)
        if isinstance(read, Fetch):
            return read
        body, past, _ = read
        chat = body.chat(past)
        service = self._models.choose(body.model)
        ids = prepare(service, replace(chat, is_counted=True), SamplingParams()).prompt_ids
        return Reply(msgspec.json.encode({"object": "response.input_tokens", "input_tokens": len(ids)}))

    def _to_keep(self, body: ResponsesBody, data: bytes | bytearray, referred: Sequence[bytes]) -> ToKeep | None:
        is_kept = body.store is not False
        if not self._models.options.keeps_responses or not (is_kept or body.conversation_id):
            return None
        items = kept_items(in_place(_given_decoder.decode(data).input, referred))
        return ToKeep(items, is_kept, body.previous_response_id or "", body.conversation_id)

    async def fetch(self, request: HttpRequest, origin: Origin) -> list[bytes]:
        """Raises BadRequest, StoreFailed."""
        return await kept_of(self._store, request.tenant, origin)

    async def respond(self, request: HttpRequest, parsed: _Parsed) -> Reply:
        """Raises ServingError before anything is answered."""
        job, writer, what = parsed.job, parsed.writer, parsed.what
        keeping = None if self._store is None or what is None else Keeping(self._store, request.tenant, what)
        return await answer(replace(job, beside=Run(self._running, job, writer, keeping)))

    # -- responses by their id

    async def retrieve(self, request: HttpRequest) -> Reply:
        """Raises ServingError."""
        if request.query.get("stream", "").lower() == "true":
            raise BadRequest("stream", "is not supported: a kept response is given whole")
        run = self._run(request)
        if run is not None:
            return Reply(msgspec.json.encode(run.writer.response))
        return Reply(await self._kept(request))

    async def delete(self, request: HttpRequest) -> Reply:
        """Raises ServingError."""
        if self._run(request) is not None:
            raise BadRequest("", "the response is still running; cancel it first")
        if not await self._needed().do(Database.delete, request.tenant, "response", request.path["id"]):
            raise _not_kept(request)
        return Reply(msgspec.json.encode({"id": request.path["id"], "object": "response", "deleted": True}))

    async def cancel(self, request: HttpRequest) -> Reply:
        """End a response with what it has. Raises ServingError; BadRequest when it has ended."""
        run = self._run(request)
        if run is None or run.writer.has_ended:
            status = msgspec.json.decode(await self._kept(request), type=dict[str, Any])["status"]
            raise BadRequest("", f"the response is not running; its status is {status}")
        run.writer.is_cancelled = True
        run.job.service.stop(run.job.generation.id)
        return Reply(msgspec.json.encode({**run.writer.response, "status": "cancelled"}))

    async def input_items(self, request: HttpRequest) -> Reply:
        """Raises ServingError."""
        page = page_of(request.query)
        try:
            found = await self._needed().do(Database.page, request.tenant, "response", request.path["id"], page)
        except LookupError as error:
            raise BadRequest("after" if page.after else "before", f"there is no item {error.args[0]!r}") from None
        if found is None:
            raise _not_kept(request)
        return list_reply(found)

    def _run(self, request: HttpRequest) -> Run | None:
        """Of this tenant."""
        run = self._running.get(request.path["id"])
        return run if run is not None and run.job.generation.tenant == request.tenant else None

    def _needed(self) -> ResponseStore:
        """Raises BadRequest."""
        if self._store is None:
            raise BadRequest("", f"this {HOW}")
        return self._store

    async def _kept(self, request: HttpRequest) -> bytes:
        found = await self._needed().do(Database.body, request.tenant, "response", request.path["id"])
        if found is None:
            raise _not_kept(request)
        return found


def _read(request: HttpRequest) -> tuple[ResponsesBody, list[InputItem], Sequence[bytes]] | Fetch:
    """The body, the items before it, and those that it names by their ids; or what is first fetched from the store.
    Raises BadRequest, NotFound.
    """
    body = decode_body(_decoder, request.body)
    origin = origin_of(body)
    if origin is not None and request.more is None:
        return Fetch(origin)
    found = found_of(origin, request.more or ())
    past = [read_item(item) for item in found.past]
    body.put_referred([read_item(item) for item in found.referred])
    return body, past, found.referred


async def _refuse_compact(request: HttpRequest) -> Reply:
    """Raises NoRoute."""
    raise NoRoute(f"{PATH}/compact is not here: this server summarises no conversations")


def _not_kept(request: HttpRequest) -> NotKept:
    return NotKept(f"Response with id {request.path['id']!r} not found.")
