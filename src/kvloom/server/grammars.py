"""What an answer must match: JSON, a JSON schema, a regular expression, one of several texts, or a grammar.

Every form becomes the one that the engine takes (llguidance's), checked here, so that a mistake is the caller's 400.
"""

import json
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from kvloom.engine.errors import BadRequest

# one space after commas and colons, none elsewhere: small models would else write spaces until their limit
_JSON_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MAX_CHARS = 200_000


def json_grammar(schema: dict[str, Any] | str | bool, field: str) -> str:
    """Of a JSON schema (draft 2020-12 as far as llguidance goes), as an object or as text. Raises BadRequest."""
    try:
        known = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(known, dict | bool):
            raise BadRequest(field, "must be a JSON schema: an object")
        text = json.dumps(known)
        _check_size(text, field)
        return checked_grammar(llguidance.LLMatcher.grammar_from_json_schema(text, overrides=_JSON_FORM), field)
    except (ValueError, RecursionError) as error:
        raise BadRequest(field, f"is no JSON schema: {error}") from None


def object_grammar() -> str:
    """Any JSON object."""
    return json_grammar({"type": "object"}, "response_format")


def regex_grammar(pattern: str, field: str) -> str:
    """Raises BadRequest."""
    _check_size(pattern, field)
    return checked_grammar(llguidance.LLMatcher.grammar_from_regex(pattern), field)


def choice_grammar(choices: list[str], field: str) -> str:
    """One of the texts. Raises BadRequest."""
    if not choices or not all(choices):
        raise BadRequest(field, "must be a list of texts, at least one, none of them empty")
    rule = "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    _check_size(rule, field)
    return checked_grammar(llguidance.LLMatcher.grammar_from_lark(rule), field)


def text_grammar(grammar: str, field: str) -> str:
    """A grammar in Lark's form, or in GBNF (llama.cpp's), which has `::=`. Raises BadRequest."""
    _check_size(grammar, field)
    try:
        lark = any_to_lark(grammar) if "::=" in grammar else grammar
    except Exception as error:  # the converter raises plain exceptions of several kinds
        raise BadRequest(field, f"is no GBNF grammar: {error}") from None
    return checked_grammar(llguidance.LLMatcher.grammar_from_lark(lark), field)


def _check_size(text: str, field: str) -> None:
    if len(text) > _MAX_CHARS:
        raise BadRequest(field, f"must have at most {_MAX_CHARS} characters, got {len(text)}")


def inner_schema(schema: Any, field: str) -> Any:
    """A JSON schema as a part of a Lark grammar, after `%json`: written in the same form. Raises BadRequest."""
    grammar: dict[str, Any] = json.loads(json_grammar(schema, field))
    return grammar["grammars"][0]["json_schema"]


def checked_grammar(grammar: str, field: str) -> str:
    """The grammar, in llguidance's own form. Raises BadRequest when it cannot be used."""
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise BadRequest(field, f"cannot be used: {' '.join(messages[0].split())[:500]}")
    return grammar
