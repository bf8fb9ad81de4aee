"""`generation_config` of a chat: transformers' settings as JSON text, as `transformers chat` sends them."""

from typing import Annotated

import msgspec
from msgspec import Meta

from kvloom.contract.errors import BadRequest
from kvloom.server.http.body import decode_body

FIELD = "generation_config"


class GenerationConfig(msgspec.Struct, kw_only=True):
    """Those that a request has, too; the others are ignored, as unknown keys of a body are."""

    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    do_sample: bool | None = None

    def values(self) -> dict[str, float | int]:
        """By the names of a body. Without sampling the temperature is 0."""
        told = {"max_tokens": self.max_new_tokens, "temperature": 0.0 if self.do_sample is False else self.temperature}
        if self.do_sample is not False:
            told |= {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p, "typical_p": self.typical_p}
        told |= {"repetition_penalty": self.repetition_penalty}
        return {name: value for name, value in told.items() if value is not None}


_decoder = msgspec.json.Decoder(GenerationConfig)


def read_generation_config(text: str) -> GenerationConfig:
    """Raises BadRequest naming the field."""
    try:
        return decode_body(_decoder, text.encode())
    except BadRequest as error:
        raise BadRequest(".".join(filter(None, (FIELD, error.field))), error.problem) from None
