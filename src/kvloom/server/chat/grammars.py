"""What an answer must match: JSON, a JSON schema, a regular expression, one of several texts, or a grammar.

Every form is translated into the engine's (llguidance's) and checked here, so that a mistake is the caller's 400.
"""

import json
from functools import cache
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.regexes import ascii_lark, ascii_regex
from kvloom.server.chat.schemas import plain_schema, without_patterns
from kvloom.server.serving.inline import may_take_long
from kvloom.server.serving.notes import note

# one space after commas and colons, none elsewhere: otherwise small models write spaces up to their limit
_JSON_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LENIENT: Any = {**_JSON_FORM, "lenient": True}
MAX_CHARS = 200_000
_INLINE_CHARS = 2000  # characters of a schema, an expression or a list of texts that compile within a few milliseconds


def json_grammar(schema: dict[str, Any] | str | bool, field: str, is_strict: bool = False) -> str:
    """From a JSON schema (draft 2020-12 as far as llguidance supports it), as object or text. Raises BadRequest.

    What llguidance cannot hold is left out, which a note tells the caller; if `is_strict`, the schema is refused.
    """
    try:
        known = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(known, dict | bool):
            raise BadRequest(field, "must be a JSON schema: an object")
        check_size(json.dumps(known), field)
        plain = plain_schema(known, field)
        text = json.dumps(plain if is_strict else without_patterns(plain, holds_pattern))
        form: Any = _JSON_FORM if is_strict else _LENIENT
        return checked_grammar(llguidance.LLMatcher.grammar_from_json_schema(text, overrides=form), field)
    except (ValueError, RecursionError) as error:
        is_deep = isinstance(error, RecursionError) or "recursion limit" in str(error)  # Python's, llguidance's
        raise BadRequest(field, "is nested too deeply" if is_deep else f"is no JSON schema: {error}") from None


def object_grammar(field: str = "response_format") -> str:
    """Any JSON object."""
    return json_grammar({"type": "object"}, field)


def regex_grammar(pattern: str, field: str) -> str:
    """Raises BadRequest."""
    check_size(pattern, field)
    return checked_grammar(llguidance.LLMatcher.grammar_from_regex(ascii_regex(pattern)), field)


def choice_grammar(choices: list[str], field: str) -> str:
    """One of the texts. Raises BadRequest."""
    if not choices or not all(choices):
        raise BadRequest(field, "must be a list of texts, at least one, none of them empty")
    rule = "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    check_size(rule, field)
    return checked_grammar(llguidance.LLMatcher.grammar_from_lark(rule), field)


def text_grammar(grammar: str, field: str) -> str:
    """A grammar in Lark's form, or in GBNF (llama.cpp's), which has `::=`. Raises BadRequest."""
    may_take_long()
    check_size(grammar, field)
    if grammar.lstrip().startswith("{"):
        raise BadRequest(field, "must be a grammar in Lark's form or in GBNF, not JSON")
    try:
        lark = any_to_lark(grammar) if "::=" in grammar else grammar
    except Exception as error:  # the converter raises several kinds of exceptions
        raise BadRequest(field, f"is no GBNF grammar: {error}") from None
    return lark_grammar(lark, field)


def lark_grammar(lark: str, field: str) -> str:
    """Raises BadRequest."""
    may_take_long()  # 300 characters of rules that double reach llguidance's limits after a second
    check_size(lark, field)
    return checked_grammar(llguidance.LLMatcher.grammar_from_lark(ascii_lark(lark)), field)


def check_size(text: str, field: str) -> None:
    """Raises BadRequest; NotInline where compiling may take long."""
    if len(text) > MAX_CHARS:
        raise BadRequest(field, f"must have at most {MAX_CHARS} characters, got {len(text)}")
    if len(text) > _INLINE_CHARS or '"allOf"' in text:  # every combination of allOf may be tried
        may_take_long()


def inner_schema(schema: Any, field: str, is_strict: bool = False) -> Any:
    """A JSON schema as part of a Lark grammar, after `%json`: serialised in the same form. See json_grammar."""
    grammar: dict[str, Any] = json.loads(json_grammar(schema, field, is_strict))
    return grammar["grammars"][0]["json_schema"]


def checked_grammar(grammar: str, field: str) -> str:
    """The grammar, in llguidance's own form. Raises BadRequest when it cannot be used."""
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise BadRequest(field, f"cannot be used: {' '.join(messages[0].split())[:500]}")
    for message in messages:
        if message.startswith("no tokenizer"):  # the ids of special tokens come from the model's own
            continue
        note(f"{field} is not held in full: {message}")
    return grammar


def is_answer_of(grammar: str, text: str) -> bool:
    """Whether an answer held to a grammar may be this text. Raises UnicodeEncodeError for half a surrogate pair."""
    ids = list(text.encode())
    matcher = llguidance.LLMatcher(_bytes(), grammar, log_level=0)
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


@cache
def _bytes() -> llguidance.LLTokenizer:
    """A tokenizer whose ids are bytes."""
    return llguidance.LLTokenizer("byte")


def holds_pattern(pattern: str) -> bool:
    """Whether llguidance can hold answers to a regular expression of a schema: it has no look-around."""
    is_error, _ = llguidance.LLMatcher.validate_grammar_with_warnings(llguidance.LLMatcher.grammar_from_regex(pattern))
    return not is_error
