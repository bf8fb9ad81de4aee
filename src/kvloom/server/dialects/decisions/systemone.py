"""TypeSafe's /v1/systemone, which Ollama, llama.cpp and LocalAI have too: the body, and its answers. Unknown keys are
ignored; `keep_alive` has no effect: models stay loaded.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.asking import Question
from kvloom.server.chat.content import Content, content_of, joined
from kvloom.server.dialects.decisions import odds, wording
from kvloom.server.dialects.decisions.openai import MAX_OPTIONS, MAX_QUESTIONS
from kvloom.server.http.body import decode_body
from kvloom.server.serving.vision.sources import ImageSource, source_of_base64, source_of_url

Json = dict[str, Any]
_UNSUPPORTED = ("assets", "audio", "videos")


class Meanings(msgspec.Struct, forbid_unknown_fields=True):
    """When the answer is true, and when false."""

    true: Any = None
    false: Any = None


class Noul(msgspec.Struct, kw_only=True, tag="noul", tag_field="type"):
    """A question of yes or no."""

    instructions: Any = None
    criteria: Meanings | None = None


class Choice(msgspec.Struct, kw_only=True, tag="choice", tag_field="type"):
    """`criteria`: the answers, each with a description or null."""

    instructions: Any = None
    criteria: Annotated[dict[str, Any], Meta(min_length=1, max_length=MAX_OPTIONS)]


class Score(msgspec.Struct, kw_only=True, tag="score", tag_field="type"):
    """`criteria`: what each level means, the lowest first."""

    instructions: Any = None
    criteria: Annotated[list[Any], Meta(min_length=1, max_length=MAX_OPTIONS)]


class Image(msgspec.Struct, kw_only=True):
    base64: str
    content_type: str = ""


Named = Noul | Choice | Score


class SystemOneBody(msgspec.Struct, kw_only=True):
    """`temperature` evens out the probabilities above 1 and sharpens them below."""

    model: str | None = None
    state: Any
    questions: Annotated[dict[str, Named], Meta(min_length=1, max_length=MAX_QUESTIONS)]
    images: list[str | Image] | None = None
    temperature: Annotated[float, Meta(gt=0, le=100)] | None = None
    priority: Annotated[int, Meta(ge=0, le=5)] | None = None  # 1 the most urgent; 0 = none
    stream: bool | None = None
    assets: Any = None
    audio: Any = None
    videos: Any = None

    def content(self) -> Content:
        """The images of `images`, those of chat messages in the state, then the state. Raises BadRequest."""
        for name in _UNSUPPORTED:
            if getattr(self, name):
                raise BadRequest(name, "is not supported; give images, and text in the state")
        if self.state is None:
            raise BadRequest("state", "is required")
        images = [_image(image, f"images[{index}]") for index, image in enumerate(self.images or ())]
        state, more = _without_images(self.state)
        return joined(content_of([*images, *more, wording.text_of(state)]))

    def asked(self) -> list[Question]:
        """Raises BadRequest."""
        return [_asked(question, f"questions.{name:.80}") for name, question in self.questions.items()]

    def answers(self, logprobs: Sequence[Sequence[float]]) -> dict[str, Json]:
        """`logprobs`: of the labels of each question."""
        each = zip(self.questions.items(), logprobs, strict=True)
        return {
            name: _answer(question, odds.probabilities(of, self.temperature or 1.0)) for (name, question), of in each
        }


class _Apart(msgspec.Struct):
    """The questions of a body, not read yet."""

    questions: dict[str, msgspec.Raw]


_decoder = msgspec.json.Decoder(SystemOneBody)
_apart_decoder = msgspec.json.Decoder(_Apart)
_one_decoder = msgspec.json.Decoder(Named)
_SOME = "questions[...]"  # how msgspec calls a value of an object


def read(body: bytes | bytearray) -> SystemOneBody:
    """Raises BadRequest that names the question."""
    try:
        return decode_body(_decoder, body)
    except BadRequest as error:
        if not error.field.startswith(_SOME):
            raise
        for name, given in decode_body(_apart_decoder, body).questions.items():
            try:
                decode_body(_one_decoder, bytes(given))
            except BadRequest as found:
                raise BadRequest(
                    ".".join(filter(None, (f"questions.{name:.80}", found.field))), found.problem
                ) from None
        raise


def usage_of(num_tokens: int, num_cached: int) -> Json:
    """`num_tokens`: of the prompt, of which `num_cached` were found computed. Nothing is generated."""
    return {"input_tokens": num_tokens, "output_tokens": 0, "cached_tokens": num_cached}


def _asked(question: Named, field: str) -> Question:
    instructions = _text(question.instructions)
    if isinstance(question, Noul):
        meanings = question.criteria or Meanings()
        both = _text(meanings.true), _text(meanings.false)
        if not (instructions.strip() or any(both)):
            raise BadRequest(f"{field}.instructions", "is required, or criteria are")
        return wording.predicate(instructions, both, field)
    if isinstance(question, Choice):
        choices = [(label, _text(meaning)) for label, meaning in question.criteria.items()]
        return wording.choice(instructions, choices, field)
    return wording.score(instructions, [(str(i), _text(level)) for i, level in enumerate(question.criteria)], field)


def _text(value: Any) -> str:
    return "" if value is None else wording.text_of(value)


def _answer(question: Named, probs: Sequence[float]) -> Json:
    told = [odds.told(prob) for prob in probs]
    if isinstance(question, Noul):
        return {"type": "noul", "noul": told[0]}
    if isinstance(question, Choice):
        of = dict(zip(question.criteria, told, strict=True))
        best = max(zip(probs, question.criteria, strict=True), key=lambda pair: pair[0])[1]
        confidence = odds.told(odds.choice_confidence(probs))
        return {"type": "choice", "choice": best, "confidence": confidence, "probabilities": of}
    return {
        "type": "score",
        "score": odds.told(odds.level(probs)),
        "confidence": odds.told(odds.score_confidence(probs)),
        "legend": {str(index): level for index, level in enumerate(question.criteria)},
        "probabilities": {str(index): prob for index, prob in enumerate(told)},
    }


def _image(given: str | Image, field: str) -> ImageSource:
    """Raises BadRequest."""
    if isinstance(given, Image):
        return source_of_base64(given.base64, given.content_type, f"{field}.base64")
    is_url = given[:8].partition(":")[0].lower() in ("data", "http", "https")
    return source_of_url(given, field) if is_url else source_of_base64(given, "", field)


def _without_images(state: Any) -> tuple[Any, list[ImageSource]]:
    """A state of chat messages, as a list or below `messages`, without its images, and these. Raises BadRequest."""
    if isinstance(state, Mapping) and isinstance(state.get("messages"), list):
        messages, images = _messages_without(state["messages"], "state.messages")
        return {**state, "messages": messages}, images
    return _messages_without(state, "state") if isinstance(state, list) else (state, [])


def _messages_without(messages: Sequence[Any], field: str) -> tuple[list[Any], list[ImageSource]]:
    found: list[Any] = []
    images: list[ImageSource] = []
    for index, message in enumerate(messages):
        parts = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(parts, list):
            found.append(message)
            continue
        kept = []
        for number, part in enumerate(parts):
            url = _url_of(part)
            if url is None:
                kept.append(part)
            else:
                images.append(source_of_url(url, f"{field}[{index}].content[{number}].image_url"))
        found.append({**message, "content": kept})
    return found, images


def _url_of(part: Any) -> str | None:
    """Of an image_url part."""
    if not isinstance(part, Mapping) or part.get("type") != "image_url":
        return None
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    return url if isinstance(url, str) else None
