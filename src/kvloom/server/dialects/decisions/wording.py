"""How an input and its questions are put to the model. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvloom.server.chat.asking import Question
from kvloom.server.chat.content import Content, joined

_BEFORE = (
    "Read the input, then answer the question behind it with one of its answers, written as it stands there, and "
    "nothing else.\n\n<input>\n"
)
_BEHIND = "\n</input>\n\n"
YES, NO = "yes", "no"

Choice = tuple[str | bool, str]  # an answer and its description, "" = none


def text_of(value: Any) -> str:
    """A text as it is, anything else as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def framed(content: Content) -> Content:
    """The input, before the questions."""
    return joined(_BEFORE, content, _BEHIND)


def predicate(instructions: str, meanings: tuple[str, str], field: str) -> Question:
    """Whether it is so. `meanings`: of yes and no, "" = the usual ones."""
    return _question(instructions, [(YES, meanings[0]), (NO, meanings[1])], "Answers", field)


def choice(instructions: str, choices: Sequence[Choice], field: str) -> Question:
    return _question(instructions, choices, "Answers", field)


def score(instructions: str, levels: Sequence[Choice], field: str) -> Question:
    """`levels`: the lowest first."""
    return _question(instructions, levels, "Answers, the lowest first", field)


def _question(instructions: str, choices: Sequence[Choice], head: str, field: str) -> Question:
    """As short as can be: each question is computed, while the input is shared. Answers are on one line where they can
    be told apart there.
    """
    labels = _labels([value for value, _ in choices])
    if any(meaning for _, meaning in choices) or any("," in label for label in labels):
        both = zip(labels, choices, strict=True)
        shown = "\n".join([f"{head}:", *(f"- {label}: {said}" if said else f"- {label}" for label, (_, said) in both)])
    else:
        shown = f"{head}: {', '.join(labels)}"
    text = f"{instructions}\n{shown}" if instructions else shown
    return Question(text, labels, field)


def _labels(values: Sequence[str | bool]) -> tuple[str, ...]:
    """What the model writes for each: texts as they are; all in quotation marks, as in JSON, if one of them is not a
    line of its own, or looks like another.
    """
    plain = [value if isinstance(value, str) else str(value).lower() for value in values]
    is_clear = len(set(plain)) == len(plain) and all(text and text == " ".join(text.split()) for text in plain)
    return tuple(plain) if is_clear else tuple(msgspec.json.encode(value).decode() for value in values)
