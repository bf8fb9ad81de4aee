"""OpenAI's /v1/decisions: the body, and its answers. Unknown keys are ignored; `safety_identifier`,
`prompt_cache_key` and `prompt_cache_options` have no effect: prompts are cached by their beginnings.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.asking import Question
from kvloom.server.chat.content import Content, content_of, joined
from kvloom.server.dialects.decisions import odds, wording
from kvloom.server.dialects.openai.messages import Part
from kvloom.server.serving.vision.sources import ImageSource

MAX_QUESTIONS = 400
MAX_OPTIONS = 255
Json = dict[str, Any]


class InputPart(Part):
    """`data`: of an input_json."""

    data: Json | list[Json] | None = None


class Item(msgspec.Struct, kw_only=True):
    """A message, a call of a tool, or what the tool answered."""

    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[InputPart] | None = None


class Asking(msgspec.Struct, kw_only=True, tag_field="type"):
    instructions: str | list[InputPart]
    name: str | None = None


class Predicate(Asking, tag="predicate"):
    """Whether a statement is true of the input, or the answer to a question about it is yes."""


class Option(msgspec.Struct, kw_only=True):
    value: str | bool
    description: str | None = None


class Choice(Asking, tag="choice"):
    choices: Annotated[list[Option], Meta(min_length=2, max_length=MAX_OPTIONS)]


class Level(msgspec.Struct, kw_only=True):
    label: str
    description: str | None = None


class Score(Asking, tag="score"):
    """`levels`: the lowest first."""

    levels: Annotated[list[Level], Meta(min_length=2, max_length=MAX_OPTIONS)]


class DecisionsBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    input: str | Annotated[list[Item], Meta(min_length=1)]
    questions: Annotated[list[Predicate | Choice | Score], Meta(min_length=1, max_length=MAX_QUESTIONS)]
    priority: Annotated[int, Meta(ge=0, le=5)] | None = None  # 1 the most urgent; 0 = none
    stream: bool | None = None

    def content(self) -> Content:
        """Raises BadRequest."""
        if isinstance(self.input, str):
            return self.input
        if len(self.input) == 1 and self.input[0].role == "user":
            return _content(self.input[0].content, "input[0].content")
        shown = [_shown(item, f"input[{index}]") for index, item in enumerate(self.input)]
        return joined(*(part for each in shown for part in (each, "\n")))

    def asked(self) -> list[Question]:
        """Raises BadRequest."""
        return [_asked(question, f"questions[{index}]") for index, question in enumerate(self.questions)]

    def answers(self, logprobs: Sequence[Sequence[float]]) -> list[Json]:
        """`logprobs`: of the labels of each question."""
        return [
            _answer(question, odds.probabilities(of)) for question, of in zip(self.questions, logprobs, strict=True)
        ]


def usage_of(num_tokens: int, num_cached: int) -> Json:
    """`num_tokens`: of the prompt, of which `num_cached` were found computed. Nothing is generated."""
    return {
        "input_tokens": num_tokens,
        "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_tokens,
    }


def _asked(question: Predicate | Choice | Score, field: str) -> Question:
    instructions = _content(question.instructions, f"{field}.instructions")
    if not isinstance(instructions, str):
        raise BadRequest(f"{field}.instructions", "must not have images; give them in the input")
    if isinstance(question, Predicate):
        if not instructions.strip():
            raise BadRequest(f"{field}.instructions", "must not be empty")
        return wording.predicate(instructions, ("", ""), field)
    if isinstance(question, Choice):
        choices = [(option.value, option.description or "") for option in question.choices]
        _check_differ([value for value, _ in choices], f"{field}.choices", "value")
        return wording.choice(instructions, choices, field)
    levels = [(level.label, level.description or "") for level in question.levels]
    _check_differ([label for label, _ in levels], f"{field}.levels", "label")
    return wording.score(instructions, levels, field)


def _check_differ(values: Sequence[str | bool], field: str, name: str) -> None:
    """A text and a boolean differ. Raises BadRequest."""
    known: set[tuple[type, str | bool]] = set()
    for index, value in enumerate(values):
        if (type(value), value) in known:
            raise BadRequest(f"{field}[{index}].{name}", f"{value!r:.80} is there twice")
        known.add((type(value), value))


def _answer(question: Predicate | Choice | Score, probs: Sequence[float]) -> Json:
    about = {"type": question.__struct_config__.tag, "name": question.name}
    told = [odds.told(prob) for prob in probs]
    if isinstance(question, Predicate):
        return {**about, "probability": told[0]}
    if isinstance(question, Choice):
        values = [option.value for option in question.choices]
        best = max(range(len(probs)), key=probs.__getitem__)
        each = [{"value": value, "probability": prob} for value, prob in zip(values, told, strict=True)]
        confidence = odds.told(odds.choice_confidence(probs))
        return {**about, "choice": values[best], "confidence": confidence, "probabilities": each}
    labels = [level.label for level in question.levels]
    each = [
        {"label": label, "value": index, "probability": prob}
        for index, (label, prob) in enumerate(zip(labels, told, strict=True))
    ]
    numbers = {"score": odds.told(odds.level(probs)), "confidence": odds.told(odds.score_confidence(probs))}
    return {**about, **numbers, "probabilities": each}


def _shown(item: Item, field: str) -> Content:
    """One of several items, on a line of its own: what it says as JSON, then its images."""
    content, output = _content(item.content, f"{field}.content"), _content(item.output, f"{field}.output")
    said: Json = {
        name: value
        for name in ("type", "role", "name", "namespace", "call_id", "arguments", "input")
        if (value := getattr(item, name)) is not None and (name, value) != ("type", "message")
    }
    if "role" not in said and "type" not in said:
        raise BadRequest(f"{field}.role", "is required")
    for name, given, read in (("content", item.content, content), ("output", item.output, output)):
        if given is not None:
            said[name] = read if isinstance(read, str) else "\n".join(one for one in read if isinstance(one, str))
    images = [
        one for read in (content, output) if not isinstance(read, str) for one in read if not isinstance(one, str)
    ]
    return content_of([wording.text_of(said), *images])


def _content(content: str | list[InputPart] | None, field: str) -> Content:
    """Raises BadRequest."""
    if content is None or isinstance(content, str):
        return content or ""
    return content_of([_part(part, f"{field}[{index}]") for index, part in enumerate(content)])


def _part(part: InputPart, field: str) -> str | ImageSource:
    if part.type == "input_image":
        if part.file_id is not None:
            raise BadRequest(f"{field}.file_id", "is not supported: no files are kept; give image_url")
        return part.source(field)
    name = {"input_json": "data", "refusal": "refusal"}.get(part.type, "text")
    if part.type not in ("input_text", "output_text", "text", "input_json", "refusal"):
        raise BadRequest(f"{field}.type", f"must be a text, JSON or image part; {part.type!r:.80} is not supported")
    value = getattr(part, name)
    if value is None:
        raise BadRequest(f"{field}.{name}", "is required")
    return wording.text_of(value)
