"""The parts of a Lark grammar that calls of every form are written with."""

import json
import re
from typing import Any, NamedTuple

from kvloom.server.chat.form import ID, CallForm
from kvloom.server.chat.grammars import inner_schema
from kvloom.server.chat.regexes import lark_regex
from kvloom.server.chat.tools import Tool


def literals(form: CallForm, *texts: str) -> str:
    """Literals one after the other; an id is any word."""
    found = [piece for piece in re.split(f"({ID})", "".join(texts)) if piece]
    return " ".join("/[A-Za-z0-9_.-]+/" if piece == ID else literal(form, piece) for piece in found) or '""'


def text_regex(schema: dict[str, Any]) -> str:
    """A regular expression for a string that is written without quotes."""
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        before = "" if pattern.startswith("^") else r"(.|\n)*"
        after = "" if pattern.endswith("$") else r"(.|\n)*"
        return lark_regex(f"{before}({pattern.removeprefix('^').removesuffix('$')}){after}")
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    return rf"/(.|\n){{{low},{high}}}/"


def json_part(schema: Any, tool: Tool) -> str:
    """Raises BadRequest."""
    return "%json " + json.dumps(inner_schema(schema, tool.schema_field, tool.is_strict))


def open_text(form: CallForm, name: str, begin: str, end: str, schema: dict[str, Any]) -> list[str]:
    """Rule `name`: a text without quotes between two marks. It ends at the first `end`, which no token of it is part of
    where that is a special one.
    """
    if any(text in end for text, _ in form.special_ids):
        return [
            f"{name}: {literal(form, begin)} {name}_text {literal(form, end)}",
            f"{name}_text: {text_regex(schema)}",
        ]
    terminal = name.upper()
    return [
        f"{name}: {literal(form, begin)} {name}_text",
        f"{name}_text[suffix={literal(form, end)}]: {terminal}",
        f"{terminal}: {text_regex(schema)} & ~/(.|\\n)*{escaped(end)}(.|\\n)*/",
    ]


def literal(form: CallForm, text: str) -> str:
    """A text, in which special tokens are themselves: no other token spells them."""
    ids = dict(form.special_ids)
    if not ids:
        return json.dumps(text, ensure_ascii=False)
    known = "|".join(map(re.escape, sorted(ids, key=len, reverse=True)))
    pieces = [piece for piece in re.split(f"({known})", text) if piece]
    return " ".join(f"<[{ids[one]}]>" if one in ids else json.dumps(one, ensure_ascii=False) for one in pieces) or '""'


class Ended(NamedTuple):
    """A text without quotes or escapes: a terminal, the mark that ends it, and a regular expression for what a reader
    takes for the end of a text and what follows.
    """

    texts: str
    mark: str
    ends: str


def ended_text(form: CallForm, name: str, ended: Ended, follow: str) -> list[str]:
    """Rule `name`: a text, the mark that ends it, and what follows."""
    texts, mark, ends = ended
    specials = [text for text, _ in form.special_ids]
    if any(text in mark for text in specials):  # which no text spells
        texts = f"({texts}) & ~/(.|\\n)*({ends})(.|\\n)*/"
        return [f"{name.upper()}: {texts}", f"{name}: {name.upper()} {literal(form, mark + follow)}"]
    if any(text in follow for text in specials):  # no terminal has both: the text ends at its mark
        texts = f"({texts}) & ~/(.|\\n)*{escaped(mark.strip())}(.|\\n)*/"
        inner = f"{name}_text[suffix={literal(form, mark)}]: {name.upper()}"
        return [f"{name.upper()}: {texts}", inner, f"{name}: {name}_text {literal(form, follow)}"]
    whole = mark + follow
    space = literal(form, whole[len(whole.rstrip()) :])
    texts = f"(({texts}) {literal(form, whole.rstrip())}) & ~/(.|\\n)*({ends})(.|\\n)+/"
    return [f"{name.upper()}: {texts}", f"{name}_text[lazy]: {name.upper()}", f"{name}: {name}_text {space}"]


def escaped(text: str) -> str:
    """A text within a regular expression."""
    plain = "".join(f"\\{char}" if char in r"\^$.|?*+()[]{}/&~#-" else char for char in text)
    return plain.replace("\n", r"\n")


def loosely(mark: str) -> str:
    """A regular expression for a mark with any white space within it, as readers take it."""
    return r"\s*".join(escaped(char) for char in mark if not char.isspace())
