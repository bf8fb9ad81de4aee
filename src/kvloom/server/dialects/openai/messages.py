"""Messages in OpenAI's form, and how those of every dialect become a chat's."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.content import Content, content_of
from kvloom.server.dialects.openai.tools import CallBody
from kvloom.server.serving.notes import note
from kvloom.server.serving.vision.sources import ImageSource, source_of_url

_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")  # parts of an answer that other servers gave


class ImageUrl(msgspec.Struct):
    """`detail` has no effect: the model's own processor decides how large an image is seen."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None  # of an assistant's answer
    image_url: str | ImageUrl | None = None
    file_id: str | None = None  # of an input_image

    def source(self, field: str) -> ImageSource:
        """Of a part that is an image. Raises BadRequest."""
        if self.image_url is None:
            raise BadRequest(f"{field}.image_url", "is required")
        if isinstance(self.image_url, str):
            return source_of_url(self.image_url, f"{field}.image_url")
        return source_of_url(self.image_url.url, f"{field}.image_url.url")


class Said(msgspec.Struct, omit_defaults=True):
    """A message, of whatever dialect. `content`: chat.content.Content, or a list of Part."""

    role: str
    content: Any = None
    name: str | None = None
    tool_calls: list[CallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None  # OpenAI's alternative to content


class Message(Said, omit_defaults=True):
    """A message in OpenAI's form. Without a role it is the user's (spec 3.3.2.3.3)."""

    role: str | None = None  # type: ignore[assignment]
    content: str | list[Part] | None = None
    function_call: Any = None  # the older form of tool_calls


def conversation_of(messages: Sequence[Said]) -> list[dict[str, Any]]:
    """Messages as a ChatRequest has them. Raises BadRequest for parts that are neither text nor image, and for calls in
    an older form.
    """
    found = []
    for i, message in enumerate(messages):
        plain = msgspec.to_builtins(msgspec.structs.replace(message, content=None))
        plain |= {"role": message.role or "user"}
        plain.pop("refusal", None)
        if plain.pop("function_call", None) is not None:
            raise BadRequest(f"messages[{i}].function_call", "is not supported; give tool_calls")
        plain["content"] = _content_of(message, f"messages[{i}].content")
        if message.reasoning is not None:
            plain.setdefault("reasoning_content", message.reasoning)
        found.append(plain)
    return found


def _content_of(message: Said, field: str) -> Content:
    """Raises BadRequest for parts that are neither text nor image."""
    is_answer = message.role == "assistant"
    if is_answer and message.refusal is not None and not message.content:
        return message.refusal
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    found: list[str | ImageSource] = []
    for i, part in enumerate(message.content):
        if not isinstance(part, Part):
            found.append(part)
            continue
        if part.type in ("image_url", "input_image"):
            found.append(part.source(f"{field}[{i}]"))
            continue
        text = part.refusal if part.type == "refusal" and is_answer else part.text
        if text is None and part.type in _THOUGHTS:
            note(f"{field}[{i}] is left out: reasoning is given as reasoning_content")
            continue
        if text is None:
            raise BadRequest(f"{field}[{i}]", f"must be a text or an image_url part; {part.type!r} is not supported")
        found.append(text)
    return content_of(found)
