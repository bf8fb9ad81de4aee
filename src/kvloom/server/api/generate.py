"""POST /generate, which TGI and vLLM share: a body with `prompt` is vLLM's, one with `inputs` TGI's."""

from typing import Any

import msgspec

from kvloom.engine.errors import BadRequest, ServingError
from kvloom.server.api.tgi import TextGeneration
from kvloom.server.api.tgi_shapes import GenerateBody
from kvloom.server.api.vllm import PromptBody, Vllm
from kvloom.server.errors import ErrorReply, tgi_reply
from kvloom.server.reply import Call, Endpoint, Reply

NEITHER = (
    "`inputs` or `prompt` must be necessary and data type must be string. "
    "Additionally, the request body must be valid json"
)


class _Either(msgspec.Struct):
    prompt: Any = None
    inputs: Any = None


_decoder = msgspec.json.Decoder(_Either)


class Generate:
    def __init__(self, tgi: TextGeneration, vllm: Vllm) -> None:
        self._tgi, self._vllm = tgi, vllm

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        summary = "TGI with `inputs`, vLLM with `prompt`"
        bodies = (GenerateBody, PromptBody)
        return (Endpoint("POST", "/generate", self.generate, summary, bodies, True, is_streaming=True),)

    def error_reply(self, error: ServingError) -> ErrorReply:
        return tgi_reply(error)

    async def generate(self, call: Call) -> Reply:
        """Raises BadRequest of a body that is neither's."""
        try:
            body = _decoder.decode(call.body)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            raise BadRequest("", NEITHER) from None
        if isinstance(body.prompt, str):
            return await self._vllm.generate(call)
        if isinstance(body.inputs, str) and body.prompt is None:
            return await self._tgi.generate(call)
        raise BadRequest("", NEITHER)
