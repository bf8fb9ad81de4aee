"""Values of arguments as a model of a form writes them, where it does not write all of them as JSON. Pure."""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvloom.server.chat.form import CDATA_BEGIN, CDATA_END, CallForm
from kvloom.server.chat.values import json_type

_BARE = re.compile(r"[^\s\"{}\[\],:]+")  # keys that objects may have without quotes


class Writing(NamedTuple):
    """How objects and lists are written, and what stands in them."""

    comma: str
    colon: str
    words: Mapping[bool | None, str]


PYTHON = Writing(", ", ": ", {True: "True", False: "False", None: "None"})


def own_writing(form: CallForm) -> Writing:
    """Of a form with quotes of its own."""
    return Writing(",", ":", {True: "true", False: "false", None: "None" if "null" in form.literals else "null"})


def spelt(form: CallForm, value: Any) -> str:
    """The value of an argument."""
    if form.own_quote:
        return inner_text(form, own_writing(form), value)
    if json_type(value) in form.literals:
        return repr(value)
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if form.kind == "python":
        return f"{form.quote}{value}{form.quote}" if form.quote else json.dumps(value, ensure_ascii=False)
    return f"{CDATA_BEGIN}{value}{CDATA_END}" if form.has_cdata and re.search(r"[<&\n]", value) else value


def inner_text(form: CallForm, writing: Writing, value: Any) -> str:
    """A value that may stand within another one."""
    if writing is PYTHON:
        return repr(value)
    if value is None or isinstance(value, bool):
        return writing.words[value]
    if isinstance(value, Mapping):
        members = sorted(value.items(), key=sorting(form)) if form.is_sorted else value.items()
        texts = [f"{key_text(writing, key)}{writing.colon}{inner_text(form, writing, each)}" for key, each in members]
        return f"{{{writing.comma.join(texts)}}}"
    if isinstance(value, list | tuple):
        return f"[{writing.comma.join(inner_text(form, writing, each) for each in value)}]"
    return f"{form.quote}{value}{form.quote}" if isinstance(value, str) else json.dumps(value)


def sorting(form: CallForm) -> Any:
    """The key by which members of objects are sorted, like Jinja's filter `dictsort`."""
    return lambda member: member[0].lower() if form.is_sorted else 0


def key_text(writing: Writing, key: str) -> str:
    """A key of an object."""
    if writing is PYTHON:
        return repr(key)
    return key if _BARE.fullmatch(key) else json.dumps(key, ensure_ascii=False)
