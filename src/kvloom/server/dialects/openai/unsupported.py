"""Fields of other servers' requests that this server does not support: refused by name.

Only those that constrain or change an answer; whether other unknown fields are errors depends on the protocol.
"""

from operator import attrgetter
from typing import Any, ClassVar

import msgspec

from kvloom.contract.errors import BadRequest

# permitted values: those without effect
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
    "chat_template": (None,),
    "documents": (None, []),
    "modalities": (None, [], ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "early_stopping": (None, False),
    "logprob_token_ids": (None,),
    "truncation_side": (None,),
    "repetition_detection": (None,),
    "include_reasoning": (None, True),
    "return_prompt_text": (None, False),
    "ec_transfer_params": (None,),
    "mm_processor_kwargs": (None, {}),
    "media_io_kwargs": (None, {}),
    "guided_whitespace_pattern": (None, ""),
    "vllm_xargs": (None, {}),
    # SGLang's
    "stop_regex": (None, "", []),
    "no_stop_trim": (None, False),
    "custom_logit_processor": (None, ""),
    "separate_reasoning": (None, True),
    "return_hidden_states": (None, False),
    "input_ids": (None,),
    "session_params": (None,),
    "lora_path": (None,),
    "bootstrap_host": (None,),
    "bootstrap_port": (None,),
    "bootstrap_room": (None,),
    # llama.cpp's, then those of TabbyAPI, TensorRT-LLM, NIM and Mistral
    "grammar_lazy": (None, False),
    "grammar_triggers": (None, []),
    "grammar_string": (None, ""),
    "regex_pattern": (None, ""),
    "banned_strings": (None, "", []),
    "guided_decoding": (None, {}),
    "nvext": (None, {}),
    "safe_prompt": (None, False),
}
_INSTEAD = dict.fromkeys(
    ("bootstrap_host", "bootstrap_port", "bootstrap_room"),
    "; servers for prompts and for answers are driven by kv_transfer_params (vllm-router --vllm-pd-disaggregation)",
)
_read, _NONE = attrgetter(*_NEUTRAL), (None,) * len(_NEUTRAL)


class Unsupported(msgspec.Struct, kw_only=True):
    """Any value is decoded, so that the refusal names the field whatever it holds."""

    honoured: ClassVar[frozenset[str]] = frozenset()  # those that a route does have

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
    chat_template: Any = None
    documents: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    early_stopping: Any = None
    logprob_token_ids: Any = None
    truncation_side: Any = None
    repetition_detection: Any = None
    include_reasoning: Any = None
    return_prompt_text: Any = None
    ec_transfer_params: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None
    guided_whitespace_pattern: Any = None
    vllm_xargs: Any = None
    stop_regex: Any = None
    no_stop_trim: Any = None
    custom_logit_processor: Any = None
    separate_reasoning: Any = None
    return_hidden_states: Any = None
    input_ids: Any = None
    session_params: Any = None
    lora_path: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    grammar_lazy: Any = None
    grammar_triggers: Any = None
    grammar_string: Any = None
    regex_pattern: Any = None
    banned_strings: Any = None
    guided_decoding: Any = None
    nvext: Any = None
    safe_prompt: Any = None

    def refuse_unsupported_fields(self, prefix: str = "") -> None:
        """`prefix`: of the fields' names, for errors. Raises BadRequest."""
        if _read(self) == _NONE:
            return
        for name, neutral in _NEUTRAL.items():
            if name not in self.honoured and getattr(self, name) not in neutral:
                raise BadRequest(prefix + name, "is not supported" + _INSTEAD.get(name, ""))
