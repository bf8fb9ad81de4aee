"""/tokenize and /detokenize as vLLM's server has them: what a prompt or a conversation is in tokens, and back."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvloom.engine.errors import BadRequest, ServingError
from kvloom.engine.request import SamplingParams
from kvloom.server.api.openai_bodies import Message, TokenId, conversation_of, template_values
from kvloom.server.api.openai_tools import ToolBody, read_tools
from kvloom.server.body import decode_body
from kvloom.server.chat_request import ChatRequest, prepare
from kvloom.server.errors import ErrorReply, openai_reply
from kvloom.server.generation import GenerationService
from kvloom.server.models import Models
from kvloom.server.reply import Call, Endpoint, Reply


class TokenizeBody(msgspec.Struct, kw_only=True):
    """A `prompt`, or `messages` for the model's chat template.

    `add_special_tokens` is true for a prompt unless given, and false for messages: templates write those themselves.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None  # of messages; true unless given
    return_token_strs: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolBody] | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None

    def text(self, service: GenerationService) -> str:
        """The text that is tokenized. Raises BadRequest naming the field."""
        if self.continue_final_message:
            raise BadRequest("continue_final_message", "is not supported")
        if self.chat_template is not None:
            raise BadRequest("chat_template", "is not supported; the model's own is used")
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("prompt", "or messages is required, and not both")
        if self.messages is None:
            return self.prompt or ""
        tools, choice = read_tools(self.tools, None)
        chat = ChatRequest(
            conversation_of(self.messages),
            tools,
            choice,
            template_values=template_values(self.chat_template_kwargs),
            add_generation_prompt=self.add_generation_prompt is not False,
        )
        return prepare(service, chat, SamplingParams()).text


class DetokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


class Tokenization(msgspec.Struct):
    """`token_strs` are spelt as the vocabulary spells them; null unless asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


class Tokenizing:
    """Of the model that the body names. Errors are OpenAI's, as those of the server that has these routes."""

    def __init__(self, models: Models) -> None:
        self._models = models

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return (
            Endpoint("POST", "/tokenize", self.tokenize, "Tokens of a prompt or of messages", (TokenizeBody,)),
            Endpoint("POST", "/detokenize", self.detokenize, "The text of tokens", (DetokenizeBody,)),
        )

    def error_reply(self, error: ServingError) -> ErrorReply:
        return openai_reply(error)

    async def tokenize(self, call: Call) -> Reply:
        """Raises BadRequest, NotFound."""
        body = decode_body(_tokenize_decoder, call.body)
        service = self._models.choose(body.model)
        is_special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
        ids = service.tokenizer.encode(body.text(service), add_special_tokens=is_special)
        texts = [service.tokenizer.token_text(id) for id in ids] if body.return_token_strs else None
        return Reply(msgspec.json.encode(Tokenization(len(ids), service.engine.max_seq_len, ids, texts)))

    async def detokenize(self, call: Call) -> Reply:
        """{"prompt": text}, special tokens included. Raises BadRequest, NotFound."""
        body = decode_body(_detokenize_decoder, call.body)
        tokenizer = self._models.choose(body.model).tokenizer
        for place, id in enumerate(body.tokens):
            if id >= tokenizer.vocab_size:
                raise BadRequest(f"tokens[{place}]", f"is {id}, outside the vocabulary of {tokenizer.vocab_size}")
        return Reply(msgspec.json.encode({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}))
