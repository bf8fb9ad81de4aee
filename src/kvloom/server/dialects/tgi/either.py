"""POST /generate, which TGI and vLLM share: a body with `prompt` is vLLM's, one with `inputs` TGI's."""

from typing import Any

import msgspec

from kvloom.contract.errors import BadRequest, ServingError
from kvloom.server.dialects.tgi.routes import GenerateBody, TextGeneration
from kvloom.server.dialects.vllm.generate import PromptBody, Vllm
from kvloom.server.errors import ErrorReply, tgi_reply
from kvloom.server.http.job import Job
from kvloom.server.http.reply import Endpoint, HttpRequest, job_route

NEITHER = (
    "`inputs` or `prompt` must be necessary and data type must be string. "
    "Additionally, the request body must be valid json"
)


class _Either(msgspec.Struct):
    prompt: Any = None
    inputs: Any = None


_decoder = msgspec.json.Decoder(_Either)


class Generate:
    """The shared route; passes each body to the dialect that it belongs to."""

    def __init__(self, tgi: TextGeneration, vllm: Vllm) -> None:
        self._tgi, self._vllm = tgi, vllm

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return (job_route("/generate", self.parse, "TGI with `inputs`, vLLM with `prompt`", GenerateBody, PromptBody),)

    def error_reply(self, error: ServingError) -> ErrorReply:
        return tgi_reply(error)

    def parse(self, request: HttpRequest) -> Job:
        """Raises BadRequest for a body of neither dialect."""
        try:
            body = _decoder.decode(request.body)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            raise BadRequest("", NEITHER) from None
        if isinstance(body.prompt, str):
            return self._vllm.parse(request)
        if isinstance(body.inputs, str) and body.prompt is None:
            return self._tgi.parse_generate(request)
        raise BadRequest("", NEITHER)
