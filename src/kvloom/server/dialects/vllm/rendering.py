"""/render as in vLLM's server: the prompt that a chat or a completion would run, in tokens; nothing is generated.

Routers ask for it, so that their view of prefixes is the server's own.
"""

from collections.abc import Sequence

import msgspec

from kvloom.contract.errors import ServingError
from kvloom.server.dialects.openai.bodies import ChatBody, CompletionBody
from kvloom.server.dialects.openai.routes import OpenAI
from kvloom.server.errors import ErrorReply
from kvloom.server.http.job import Job
from kvloom.server.http.reply import Endpoint, HttpRequest, Reply


class Rendered(msgspec.Struct):
    """`token_ids`: the whole prompt, chat template and special tokens in it."""

    request_id: str
    model: str
    token_ids: tuple[int, ...]


class Rendering:
    """Bodies and errors are those of the generating routes, so that both refuse the same."""

    def __init__(self, openai: OpenAI) -> None:
        self._openai = openai

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        path, bodies = "/v1/chat/completions/render", (ChatBody,)
        return (
            Endpoint("POST", path, None, "Tokens of a chat's prompt", bodies, parse=self.chat),
            Endpoint(
                "POST", "/v1/completions/render", None, "Tokens of prompts", (CompletionBody,), parse=self.completion
            ),
        )

    def error_reply(self, error: ServingError) -> ErrorReply:
        return self._openai.error_reply(error)

    def chat(self, request: HttpRequest) -> Reply:
        """One object. Raises BadRequest, NotFound."""
        [rendered] = _rendered(self._openai.chat(request))
        return Reply(msgspec.json.encode(rendered))

    def completion(self, request: HttpRequest) -> Reply:
        """A list, one object a prompt. Raises BadRequest, NotFound."""
        return Reply(msgspec.json.encode(_rendered(self._openai.completion(request))))


def _rendered(job: Job) -> Sequence[Rendered]:
    generation = job.generation
    return [Rendered(generation.id, job.service.name, prompt) for prompt in generation.prompts]
