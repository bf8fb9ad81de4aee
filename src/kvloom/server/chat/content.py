"""Content of a message: a text, or texts and images in their order. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from kvloom.server.serving.vision.sources import ImageSource

Content: TypeAlias = str | Sequence[str | ImageSource]
Messages: TypeAlias = Sequence[Mapping[str, Any]]


def content_of(items: Sequence[str | ImageSource]) -> Content:
    """Texts alone are joined by newlines; if there are images, the items stay as they are."""
    texts = [item for item in items if isinstance(item, str)]
    return "\n".join(texts) if len(texts) == len(items) else list(items)


def text_of(content: Content) -> str:
    """Without the images."""
    return content if isinstance(content, str) else "\n".join(item for item in content if isinstance(item, str))


def joined(*contents: Content) -> Content:
    """All texts concatenated."""
    found: list[str | ImageSource] = []
    for content in contents:
        for item in (content,) if isinstance(content, str) else content:
            if item == "":
                continue
            if found and isinstance(item, str) and isinstance(found[-1], str):
                found[-1] += item
            else:
                found.append(item)
    return content_of(found)


def sources_of(messages: Messages) -> tuple[ImageSource, ...]:
    """All images of the messages, in order."""
    contents = (message.get("content") for message in messages)
    items = (item for content in contents if isinstance(content, list) for item in content)
    return tuple(item for item in items if isinstance(item, ImageSource))


def with_parts(messages: Messages) -> list[dict[str, Any]]:
    """For chat templates that take parts: every content as a list."""
    return [{**message, "content": _parts(message.get("content") or "")} for message in messages]


def with_texts(messages: Messages, image_text: str) -> list[dict[str, Any]]:
    """For templates that take texts: `image_text` stands for each image, on a line of its own."""
    return [{**message, "content": _text(message.get("content") or "", image_text)} for message in messages]


def _parts(content: Content) -> list[dict[str, str]]:
    items = (content,) if isinstance(content, str) else content
    return [{"type": "text", "text": item} if isinstance(item, str) else {"type": "image"} for item in items]


def _text(content: Content, image_text: str) -> str:
    items = (content,) if isinstance(content, str) else content
    return "\n".join(item if isinstance(item, str) else image_text for item in items)
