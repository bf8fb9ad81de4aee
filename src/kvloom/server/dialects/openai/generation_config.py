"""`generation_config` of a chat: transformers' settings as JSON text, as `transformers chat` sends them."""

from typing import Annotated

import msgspec
from msgspec import Meta

from kvloom.contract.errors import BadRequest
from kvloom.contract.sampling import ROWS
from kvloom.server.dialects.sampling import Named, bounds
from kvloom.server.http.body import decode_body

FIELD = "generation_config"


class GenerationConfig(msgspec.Struct, kw_only=True):
    """Those that a request has, too; the others are ignored, as unknown keys of a body are."""

    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, bounds("temperature", high=2)] | None = None
    top_p: Annotated[float, bounds("top_p", opens_low=False)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, bounds("min_p")] | None = None
    typical_p: Annotated[float, bounds("typical_p")] | None = None
    repetition_penalty: Annotated[float, bounds("repetition_penalty")] | None = None
    do_sample: bool | None = None

    def values(self) -> dict[str, float | int]:
        """By the names of a body. Without sampling the temperature is 0."""
        told = _NAMED.given(self)
        if self.do_sample is False:
            told = {name: value for name, value in told.items() if ROWS[name].kind != "cuts"} | {"temperature": 0.0}
        return told if self.max_new_tokens is None else told | {"max_tokens": self.max_new_tokens}


_NAMED = Named(GenerationConfig)
_decoder = msgspec.json.Decoder(GenerationConfig)


def read_generation_config(text: str) -> GenerationConfig:
    """Raises BadRequest naming the field."""
    try:
        return decode_body(_decoder, text.encode())
    except BadRequest as error:
        raise BadRequest(".".join(filter(None, (FIELD, error.field))), error.problem) from None
