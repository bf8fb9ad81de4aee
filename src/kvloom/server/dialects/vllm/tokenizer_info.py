"""/tokenizer_info as in vLLM's server: the contents of tokenizer_config.json, and the chat template in use."""

from pathlib import Path
from typing import Any

import msgspec

from kvloom.checkpoints.files import read_object
from kvloom.contract.errors import ModelError, ServingError
from kvloom.server.errors import ErrorReply, openai_reply
from kvloom.server.http.reply import Endpoint, HttpRequest, Reply
from kvloom.server.serving.files import ReadOnce
from kvloom.server.serving.registry import Models
from kvloom.server.serving.service import GenerationService

_CLASS = "PreTrainedTokenizerFast"  # reads a tokenizer.json; the default if no class is named


class TokenizerInfo:
    """Of the first model, or of the one that `?model=` names."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._told = ReadOnce(_encode)

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return (Endpoint("GET", "/tokenizer_info", self.info, "The tokenizer's configuration and chat template"),)

    def error_reply(self, error: ServingError) -> ErrorReply:
        return openai_reply(error)

    async def info(self, request: HttpRequest) -> Reply:
        """Raises NotFound."""
        return Reply(await self._told.of(self._models.of_adapter(request.query.get("model"))))


def _encode(service: GenerationService) -> bytes:
    """For a GGUF file, which has no tokenizer_config.json, made from the tokenizer alone."""
    tokenizer = service.tokenizer
    special = [id for id in range(tokenizer.vocab_size) if tokenizer.is_special(id)]
    eos = tokenizer.eos_id
    made = {
        "tokenizer_class": _CLASS,
        "bos_token": None if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id),
        "eos_token": None if eos is None else tokenizer.token_text(eos),
        "model_max_length": service.engine.max_seq_len,
        "added_tokens_decoder": {str(id): {"content": tokenizer.token_text(id), "special": True} for id in special},
    }
    template = tokenizer.chat_template() or None
    return msgspec.json.encode({**made, **_stored(Path(service.card.engine.model)), "chat_template": template})


def _stored(model: Path) -> dict[str, Any]:
    """tokenizer_config.json; without it, or when it cannot be read, nothing."""
    try:
        return read_object(model / "tokenizer_config.json")
    except ModelError:
        return {}
