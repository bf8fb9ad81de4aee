"""/tokenize and /detokenize as in vLLM's server: a prompt or a conversation to tokens, and back."""

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvloom.contract.errors import BadRequest, ServingError
from kvloom.contract.sampling import SamplingParams
from kvloom.server.chat.request import ChatRequest, prepare
from kvloom.server.dialects.openai.bodies import TokenId, continues, template_values
from kvloom.server.dialects.openai.messages import Message, conversation_of
from kvloom.server.dialects.openai.tools import ToolBody, read_tools
from kvloom.server.errors import ErrorReply, openai_reply
from kvloom.server.http.body import decode_body
from kvloom.server.http.reply import Endpoint, HttpRequest, Reply
from kvloom.server.serving.prompts import encode_text, request_limit
from kvloom.server.serving.registry import Models
from kvloom.server.serving.service import GenerationService


class TokenizeBody(msgspec.Struct, kw_only=True):
    """A `prompt`, or `messages` for the model's chat template.

    `add_special_tokens` is true for a prompt unless given, and false for messages: templates write those themselves.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None  # of messages; true unless given, or the last one is continued
    return_token_strs: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolBody] | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None

    def ids(self, service: GenerationService) -> tuple[int, ...]:
        """Raises BadRequest naming the field."""
        is_continued = continues(self.continue_final_message, self.add_generation_prompt)
        if self.chat_template is not None:
            raise BadRequest("chat_template", "is not supported; the model's own is used")
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("prompt", "or messages is required, and not both")
        if self.messages is None:
            is_special = self.add_special_tokens is not False
            return encode_text(service, self.prompt or "", "prompt", request_limit(service), is_special)
        tools, choice = read_tools(self.tools, None)
        chat = ChatRequest(
            conversation_of(self.messages),
            tools,
            choice,
            template_values=template_values(self.chat_template_kwargs),
            add_generation_prompt=self.add_generation_prompt is not False and not is_continued,
            is_continued=is_continued,
            add_special_tokens=bool(self.add_special_tokens),
            is_counted=True,
        )
        return prepare(service, chat, SamplingParams()).prompt_ids


class DetokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


class Tokenization(msgspec.Struct):
    """`token_strs` are spelt as the vocabulary spells them; null unless asked for."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | None


_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


class Tokenizing:
    """Of the model that the body names. Errors are OpenAI's, as those of the server that has these routes."""

    def __init__(self, models: Models) -> None:
        self._models = models

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        def post(path: str, parse: Callable[[HttpRequest], Reply], summary: str, body: type) -> Endpoint:
            return Endpoint("POST", path, None, summary, (body,), parse=parse)

        return (
            post("/tokenize", self.tokenize, "Tokens of a prompt or of messages", TokenizeBody),
            post("/detokenize", self.detokenize, "The text of tokens", DetokenizeBody),
        )

    def error_reply(self, error: ServingError) -> ErrorReply:
        return openai_reply(error)

    def tokenize(self, request: HttpRequest) -> Reply:
        """Raises BadRequest, NotFound."""
        body = decode_body(_tokenize_decoder, request.body)
        service = self._models.choose(body.model)
        ids = body.ids(service)
        texts = [service.tokenizer.token_text(id) for id in ids] if body.return_token_strs else None
        return Reply(msgspec.json.encode(Tokenization(len(ids), service.engine.max_seq_len, ids, texts)))

    def detokenize(self, request: HttpRequest) -> Reply:
        """{"prompt": text}, special tokens included. Raises BadRequest, NotFound."""
        body = decode_body(_detokenize_decoder, request.body)
        tokenizer = self._models.choose(body.model).tokenizer
        for index, id in enumerate(body.tokens):
            if id >= tokenizer.vocab_size:
                raise BadRequest(f"tokens[{index}]", f"is {id}, outside the vocabulary of {tokenizer.vocab_size}")
        return Reply(msgspec.json.encode({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}))
