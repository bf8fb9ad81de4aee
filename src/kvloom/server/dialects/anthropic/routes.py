"""Anthropic's /v1/messages over the same chat, whole or as its sequence of events, and /v1/messages/count_tokens."""

import msgspec

from kvloom.contract.errors import ServingError
from kvloom.contract.sampling import SamplingParams
from kvloom.server.dialects.anthropic.bodies import CountBody, MessagesBody
from kvloom.server.dialects.anthropic.shapes import MessageWriter, Told
from kvloom.server.dialects.ids import new_id
from kvloom.server.dialects.sampling import advised
from kvloom.server.errors import ErrorReply, anthropic_reply
from kvloom.server.http.body import decode_body
from kvloom.server.http.job import Job
from kvloom.server.http.reply import Endpoint, HttpRequest, Reply, job_route
from kvloom.server.serving.generation import Generation
from kvloom.server.serving.registry import Models

PATH = "/v1/messages"
_decoder = msgspec.json.Decoder(MessagesBody)
_count_decoder = msgspec.json.Decoder(CountBody)


class Messages:
    """The header anthropic-version has no effect."""

    def __init__(self, models: Models) -> None:
        self._models = models

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        count = ("POST", f"{PATH}/count_tokens", None, "Tokens of a message's prompt", (CountBody,))
        return job_route(PATH, self.create, "Messages", MessagesBody), Endpoint(*count, parse=self.count)

    def error_reply(self, error: ServingError) -> ErrorReply:
        return anthropic_reply(error)

    def create(self, request: HttpRequest) -> Job:
        """Raises BadRequest, NotFound."""
        body = decode_body(_decoder, request.body)
        service = self._models.choose(body.model)
        chat = body.prepared(service, advised(body.params(), body, service))
        id = f"msg_{new_id()}"
        generation = Generation(
            id, (chat.prompt_ids,), chat.params, priority=body.priority or 0, tenant=request.tenant, sight=chat.sight
        )
        service.check(generation, "messages")
        told = Told(
            len(chat.prompt_ids),
            min(body.max_tokens, service.max_output_tokens),
            omits_thinking=body.thinking is not None and body.thinking.display == "omitted",
            is_empty=not body.max_tokens,
        )
        writer = MessageWriter(id, service.name, told, chat.output())
        return Job(service, generation, writer, bool(body.stream))

    def count(self, request: HttpRequest) -> Reply:
        """Raises BadRequest, NotFound."""
        body = decode_body(_count_decoder, request.body)
        chat = body.prepared(self._models.choose(body.model), SamplingParams(), is_counted=True)
        return Reply(msgspec.json.encode({"input_tokens": len(chat.prompt_ids)}))
