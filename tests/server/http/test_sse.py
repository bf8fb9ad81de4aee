"""Server-sent events whose JSON is formatted around their text."""

import msgspec
import pytest
from msgspec import UNSET

from kvloom.server.dialects.openai.shapes import ChatChunkChoice, ChatDelta, Chunk, TextChunkChoice
from kvloom.server.http.sse import TextFrame, event

HOSTILE = ["", "a", '"', '""', "\\", '\\"', "\n\ndata: [DONE]\n\n", "\0\x1f\x7f", "é", "\u2028", "😀", "</s>" * 50]


def text_of(text: str) -> TextChunkChoice:
    return TextChunkChoice(3, text)


def chat_of(text: str) -> ChatChunkChoice:
    return ChatChunkChoice(3, ChatDelta(content=text))


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("name", ["m", '""', 'text":""', ""])  # field `model`, and the answer's text
@pytest.mark.parametrize("usage", [UNSET, None])
@pytest.mark.parametrize("choice", [text_of, chat_of])
def test_a_frame_around_a_text_is_the_frame_encoded_whole(text, name, usage, choice):
    def whole(text: str) -> bytes:
        return event(msgspec.json.encode(Chunk(name, "text_completion", 1, name, "fp", [choice(text)], usage)))

    assert TextFrame(whole("")).of(text) == whole(text)
