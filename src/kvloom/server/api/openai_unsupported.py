"""Fields of OpenAI's and vLLM's requests that ask for what this server does not do: refused by name."""

from typing import Any

import msgspec

from kvloom.engine.errors import BadRequest

# what these may be: the values that ask for nothing
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
    "bad_words": (None, []),
    "allowed_token_ids": (None, []),
    "logits_processors": (None, []),
    "spaces_between_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,),
    "return_tokens_as_token_ids": (None, False),
    "prompt_embeds": (None,),
    "kv_transfer_params": (None,),
    "continue_final_message": (None, False),
    "chat_template": (None,),
    "documents": (None, []),
    "modalities": (None, [], ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
}


class Unsupported(msgspec.Struct, kw_only=True):
    """Any value is decoded, so that the refusal names the field whatever it holds."""

    use_beam_search: Any = None
    length_penalty: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    logits_processors: Any = None
    spaces_between_special_tokens: Any = None
    truncate_prompt_tokens: Any = None
    return_tokens_as_token_ids: Any = None
    prompt_embeds: Any = None
    kv_transfer_params: Any = None
    continue_final_message: Any = None
    chat_template: Any = None
    documents: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None

    def refuse_unsupported_fields(self) -> None:
        """Raises BadRequest."""
        for name, neutral in _NEUTRAL.items():
            if getattr(self, name) not in neutral:
                raise BadRequest(name, "is not supported")
