"""/v1/images/generations as in OpenAI's API: pictures of a prompt, optionally preceded by unfinished ones."""

import random
import re
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvloom.contract.errors import BadRequest, ServingError
from kvloom.images.messages import Format, Picture
from kvloom.server.dialects.ids import new_id
from kvloom.server.dialects.openai.image_answers import PicturesWriter, frames_of
from kvloom.server.errors import ErrorReply, openai_reply
from kvloom.server.http import sse
from kvloom.server.http.body import decode_body
from kvloom.server.http.formatting import formatted
from kvloom.server.http.reply import Endpoint, HttpRequest, Reply
from kvloom.server.http.streaming import begun
from kvloom.server.serving.pictures.card import MAX_STEPS, Wanted
from kvloom.server.serving.registry import Models

MAX_PICTURES = 10
MAX_PROMPT = 32_000  # characters
_MAX_SEED = 2**63 - 1
_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})\Z")
# quality in requests -> its name in the answer, and factor of the model's number of steps
_QUALITIES = {
    "auto": ("medium", 1.0),
    "low": ("low", 0.5),
    "medium": ("medium", 1.0),
    "standard": ("medium", 1.0),
    "high": ("high", 1.5),
    "hd": ("high", 1.5),
    "xhigh": ("xhigh", 2.0),
    "max": ("max", 3.0),
}
# permitted values of unsupported fields: those without effect
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "style": (None,),
    "complexity": (None,),
    "frame_count": (None,),
    "frame_duration_ms": (None,),
    "svg": (None,),
    "image": (None,),
    "images": (None, []),
    "mask": (None,),
    "input_fidelity": (None,),
    "loras": (None, []),
    "true_cfg_scale": (None,),
}


class ImageBody(msgspec.Struct, kw_only=True):
    """`user` and `safety_identifier` have no effect. `negative_prompt` and the fields below it are vLLM's."""

    prompt: Annotated[str, Meta(min_length=1, max_length=MAX_PROMPT)]
    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_PICTURES)] | None = None
    size: str | None = None
    quality: str | None = None
    response_format: str | None = None
    output_format: str | None = None
    output_compression: Annotated[int, Meta(ge=0, le=100)] | None = None
    background: str | None = None
    moderation: Literal["auto", "low"] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Meta(ge=0, le=3)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    seed: Annotated[int, Meta(ge=0, le=_MAX_SEED)] | None = None
    negative_prompt: Annotated[str, Meta(max_length=MAX_PROMPT)] | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, le=MAX_STEPS)] | None = None
    guidance_scale: Annotated[float, Meta(ge=0, le=100)] | None = None

    style: Any = None
    complexity: Any = None
    frame_count: Any = None
    frame_duration_ms: Any = None
    svg: Any = None
    image: Any = None
    images: Any = None
    mask: Any = None
    input_fidelity: Any = None
    loras: Any = None
    true_cfg_scale: Any = None

    def check(self) -> None:
        """Raises BadRequest for options that this server does not support."""
        for name, neutral in _UNSUPPORTED.items():
            if getattr(self, name) not in neutral:
                raise BadRequest(name, "is not supported")
        if self.response_format not in (None, "b64_json"):
            raise BadRequest(
                "response_format", f"must be b64_json: pictures are not kept, got {self.response_format!r}"
            )
        if self.background not in (None, "auto", "opaque"):
            raise BadRequest("background", f"must be auto or opaque, got {self.background!r}")
        if self.output_compression not in (None, 100) and self.format == "png":
            raise BadRequest("output_compression", "must be 100 for png; jpeg and webp have others")
        if self.partial_images and not self.stream:
            raise BadRequest("partial_images", "needs stream: true")

    @property
    def format(self) -> Format:
        """Raises BadRequest."""
        for name in ("png", "jpeg", "webp"):
            if self.output_format in (name, None):
                return name
        raise BadRequest("output_format", f"must be png, jpeg or webp, got {self.output_format!r}")

    def wanted(self) -> Wanted:
        """With a seed drawn where none is given; each further picture has the next one. Raises BadRequest."""
        seed = random.getrandbits(32) if self.seed is None else self.seed
        return Wanted(
            self.prompt,
            self.negative_prompt or "",
            _size(self.size),
            tuple((seed + i) % (_MAX_SEED + 1) for i in range(self.n or 1)),
            self.num_inference_steps,
            _quality(self.quality)[1],
            self.guidance_scale,
            self.format,
            100 if self.output_compression is None else self.output_compression,
            self.partial_images or 0,
        )


_decoder = msgspec.json.Decoder(ImageBody)


@dataclass(frozen=True, slots=True)
class Asked:
    """A body, parsed."""

    model: str | None
    wanted: Wanted
    quality: str
    is_streamed: bool


class Images:
    def __init__(self, models: Models) -> None:
        self._models = models

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        one = ("POST", "/v1/images/generations", self.answer, "Pictures of a prompt", (ImageBody,))
        return (Endpoint(*one, is_generating=True, is_streaming=True, parse=self.parse),)

    def error_reply(self, error: ServingError) -> ErrorReply:
        return openai_reply(error)

    def parse(self, request: HttpRequest) -> Asked:
        """Raises BadRequest."""
        body = decode_body(_decoder, request.body)
        body.check()
        return Asked(body.model, body.wanted(), _quality(body.quality)[0], bool(body.stream))

    async def answer(self, request: HttpRequest, asked: Asked) -> Reply:
        """Raises BadRequest, NotFound, Overloaded, Unavailable, GenerationFailed."""
        service = self._models.choose_pictures(asked.model)
        order = service.order(asked.wanted)
        writer = PicturesWriter(order, asked.quality, int(request.time_s))
        reports = service.reports(order, f"img-{new_id()}", request.tenant)
        if asked.is_streamed:
            return await begun(frames_of(reports, writer), sse.MEDIA_TYPE)
        num_bytes = 0
        async with aclosing(reports):
            async for report in reports:
                writer.fold(report)
                num_bytes += len(report.data) if isinstance(report, Picture) else 0
        return await formatted(num_bytes // 100, writer.whole)


def _size(text: str | None) -> tuple[int, int] | None:
    """Width and height; None for "auto". Raises BadRequest."""
    if text in (None, "auto"):
        return None
    found = _SIZE.match(text or "")
    if found is None:
        raise BadRequest("size", f"must be WIDTHxHEIGHT in pixels, as 1024x768, or auto, got {text!r}"[:200])
    return int(found[1]), int(found[2])


def _quality(name: str | None) -> tuple[str, float]:
    """Raises BadRequest."""
    found = _QUALITIES.get(name or "auto")
    if found is None:
        raise BadRequest("quality", f"must be one of {', '.join(_QUALITIES)}, got {name!r}"[:200])
    return found
