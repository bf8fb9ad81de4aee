"""Constraints on an answer, in all forms that servers accept: each is honoured on every route, or refused by name.

OpenAI        response_format
vLLM          structured_outputs, guided_json | regex | choice | grammar | json_object, structural_tag
SGLang        regex, ebnf, json_schema (a text), structural_tag
llama.cpp     grammar (GBNF), json_schema (an object), response_format {"type": "json_object", "schema"}
TGI           grammar {"type", "value"}, response_format of the same form
Ollama        format
Anthropic     output_format

None, False and an empty text ask for nothing. What cannot be done is in openai/unsupported.py.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import msgspec

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.grammars import choice_grammar, json_grammar, object_grammar, regex_grammar, text_grammar
from kvloom.server.chat.structural_tags import tag_grammar
from kvloom.server.dialects.openai.unsupported import Unsupported

Schema = str | dict[str, Any]  # an object, or its JSON text
Maker = Callable[[Any, str], str]  # (value, its field) -> the grammar. Raises BadRequest
_NOTHING = (None, False, "")


class JsonSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's json_schema; answers follow the schema whether `strict` says so or not, in full if it says so."""

    name: str | None = None
    schema: Schema | None = None
    description: str | None = None
    strict: bool | str | None = None

    def grammar(self, field: str) -> str:
        """Raises BadRequest."""
        if self.schema is None:
            raise BadRequest(f"{field}.schema", "is required")
        return json_grammar(self.schema, f"{field}.schema", self.strict is True)


def _object(_: Any, field: str) -> str:
    return object_grammar(field)


def _regex(given: Any, field: str) -> str:
    if not isinstance(given, str):
        raise BadRequest(field, "must be a text")
    return regex_grammar(given, field)


def _named_schema(given: Any, field: str) -> str:
    """Of a JsonSchema, read or not."""
    try:
        known = given if isinstance(given, JsonSchema) else msgspec.convert(given, JsonSchema)
    except msgspec.ValidationError as error:
        raise BadRequest(field, str(error)) from None
    return known.grammar(field)


# keys allowed beside each type of format; except for "text" and "json_object" one of them is required
_FORMATS: dict[str, dict[str, Maker]] = {
    "text": {},
    "json_object": {"schema": json_grammar, "value": json_grammar},
    "json_schema": {"json_schema": _named_schema, "schema": json_grammar, "value": _named_schema},
    "json": {"value": json_grammar, "schema": json_grammar},
    "regex": dict.fromkeys(("pattern", "regex", "value"), _regex),
    "grammar": {"grammar": text_grammar},
    "ebnf": {"ebnf": text_grammar},
}
_TAG_PARTS = ("format", "structures", "triggers", "at_least_one")
_PARTS = ("json_schema", "schema", "value", "pattern", "regex", "grammar", "ebnf", *_TAG_PARTS)


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's response_format, with other servers' extensions. name, description and strict have no effect."""

    type: Literal["text", "json_object", "json_schema", "json", "regex", "grammar", "ebnf", "structural_tag"]
    json_schema: JsonSchema | None = None
    schema: Schema | None = None
    value: Any = None
    pattern: str | None = None
    regex: str | None = None
    grammar: str | None = None
    ebnf: str | None = None
    format: Any = None
    structures: Any = None
    triggers: Any = None
    at_least_one: bool | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | str | None = None

    def answer_grammar(self, field: str) -> str:
        """The grammar of the answer, "" = unrestricted. Raises BadRequest, also for a key of another type."""
        given = {name: value for name in _PARTS if (value := getattr(self, name)) is not None}
        makers = _FORMATS.get(self.type, {})
        wrong = next((name for name in given if name not in (makers or _TAG_PARTS)), None)
        if wrong is not None or (self.type == "text" and given):
            raise BadRequest(f"{field}.{wrong or next(iter(given))}", f"does not go with the type {self.type!r}")
        if self.type == "structural_tag":
            return tag_grammar({"type": self.type, **given}, field)
        if len(given) > 1:
            raise BadRequest(f"{field}.{min(given)}", f"and {max(given)} are both given; give one")
        for name, value in given.items():
            return makers[name](value, f"{field}.{name}")
        if self.type not in ("text", "json_object"):
            raise BadRequest(f"{field}.{next(iter(makers))}", "is required")
        return object_grammar(field) if self.type == "json_object" else ""


class TypedGrammar(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """TGI's grammar."""

    type: Literal["json", "json_object", "json_schema", "regex"]
    value: Any

    def answer_grammar(self, field: str) -> str:
        """Raises BadRequest."""
        return _FORMATS[self.type]["value"](self.value, f"{field}.value")


class OutputFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Anthropic's."""

    type: Literal["json_schema"]
    schema: dict[str, Any]

    def answer_grammar(self, field: str) -> str:
        """Raises BadRequest."""
        return json_grammar(self.schema, f"{field}.schema")


def _format(given: str | dict[str, Any], field: str) -> str:
    """Ollama's."""
    if given == "json":
        return object_grammar(field)
    if isinstance(given, str):
        raise BadRequest(field, 'must be "json" or a JSON schema: an object')
    return json_grammar(given, field)


def _text_or_typed(given: str | TypedGrammar, field: str) -> str:
    return text_grammar(given, field) if isinstance(given, str) else given.answer_grammar(field)


# vLLM's kinds, in structured_outputs and, but for the last, as guided_KIND
_KINDS: dict[str, Maker] = {
    "json": json_grammar,
    "regex": regex_grammar,
    "choice": choice_grammar,
    "grammar": text_grammar,
    "json_object": _object,
    "structural_tag": tag_grammar,
}
_FIELDS: dict[str, Maker] = {
    **{f"guided_{kind}": maker for kind, maker in _KINDS.items() if kind != "structural_tag"},
    "structural_tag": tag_grammar,
    "json_schema": json_grammar,
    "regex": regex_grammar,
    "ebnf": text_grammar,
    "grammar": _text_or_typed,
    "format": _format,
    "output_format": lambda given, field: given.answer_grammar(field),
    "response_format": lambda given, field: given.answer_grammar(field),
}


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's structured_outputs. Answers fall back to nothing and have no free white space, whatever these say."""

    json: Schema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Schema | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None

    def check(self, field: str) -> None:
        """Raises BadRequest."""
        for name in ("disable_additional_properties", "whitespace_pattern"):
            if getattr(self, name):
                raise BadRequest(f"{field}.{name}", "is not supported")


class Constraints(Unsupported, kw_only=True):
    """A body, or its parameters, that may constrain the answer. guided_decoding_backend has no effect."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    structural_tag: Schema | None = None
    json_schema: Schema | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | TypedGrammar | None = None
    format: str | dict[str, Any] | None = None
    output_format: OutputFormat | None = None
    guided_decoding_backend: Any = None

    def answer_grammar(self, prefix: str = "", own: Mapping[str, Callable[[], str]] | None = None) -> str:
        """The grammar of the answer, "" = unrestricted. `prefix`: of the fields' names, for errors.

        `own`: what the route has besides, by field. Raises BadRequest: a wrong one, more than one, or a field that is
        not supported.
        """
        self.refuse_unsupported_fields(prefix)
        found: dict[str, Callable[[], str]] = dict(own or {})
        for name, maker in _FIELDS.items():
            given = getattr(self, name)
            if isinstance(given, ResponseFormat) and given.type == "text":
                given.answer_grammar(prefix + name)
            elif given not in _NOTHING:
                found[prefix + name] = partial(maker, given, prefix + name)
        if self.structured_outputs is not None:
            field = prefix + "structured_outputs"
            self.structured_outputs.check(field)
            for kind, maker in _KINDS.items():
                given = getattr(self.structured_outputs, kind)
                if given not in _NOTHING:
                    found[f"{field}.{kind}"] = partial(maker, given, f"{field}.{kind}")
        if len(found) > 1:
            raise BadRequest(min(found), f"and {max(found)} are both given; give one")
        return next(iter(found.values()))() if found else ""

    def refuse_outside(self) -> None:
        """Of a body whose parameters are a part of it: raises BadRequest for those that are beside them."""
        for name in (*_FIELDS, "structured_outputs"):
            if getattr(self, name) not in _NOTHING:
                raise BadRequest(name, f"must be inside of parameters: parameters.{name}")
        self.refuse_unsupported_fields()
