r"""Lark grammars as one regular expression, as far as no rule leads back to itself. Pure.

A text within a call has quotes, escapes or marks of the call's own form around it; these are known for regular
expressions, see argument_grammars.py. Lark's syntax: https://lark-parser.readthedocs.io/en/stable/grammar.html, as far
as llguidance takes it. White space that a grammar ignores may stand before each terminal of a rule.
"""

import json
import re
from collections.abc import Iterator, Mapping

_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|\#[^\n]*)
    |(?P<statement>%[a-z]+)
    |(?P<head>(?m:^)[ \t]*[!?]*[A-Za-z_][\w-]*[ \t]*:)
    |(?P<string>"(?:\\.|[^"\\])*"i?)
    |(?P<regex>/(?:\\.|[^/\\])+/[a-z]*)
    |(?P<name>[A-Za-z_][\w-]*)
    |(?P<number>\d+)
    |(?P<mark>->|\.\.|[()\[\]{}|?*+~,.])""",
    re.VERBOSE,
)
_COMMON = {
    "DIGIT": "[0-9]", "HEXDIGIT": "[a-fA-F0-9]", "INT": "[0-9]+", "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)", "_EXP": "[eE][+-]?[0-9]+",
    "FLOAT": r"(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)",
    "SIGNED_FLOAT": r"[+-]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)",
    "NUMBER": r"(?:[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)",
    "ESCAPED_STRING": r'"(?:[^"\\]|\\.)*"', "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]", "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+", "CNAME": "[_A-Za-z][_A-Za-z0-9]*", "WS_INLINE": r"[ \t]+", "WS": r"[ \t\f\r\n]+",
    "CR": r"\r", "LF": r"\n", "NEWLINE": r"(?:\r?\n)+", "SH_COMMENT": r"#[^\n]*", "CPP_COMMENT": r"//[^\n]*",
    "C_COMMENT": r"/\*(?:[^*]|\*+[^*/])*\*+/", "SQL_COMMENT": r"--[^\n]*",
}  # fmt: skip
_MAX_CHARS = 50_000  # of the expression: every use of a rule repeats it
_FLAGS = frozenset("is")  # of expressions; those that change more than letters are not read
Tokens = list[tuple[str, str]]  # kind, text


class NotRegular(Exception):
    """The grammar is recursive, too large, or has what Lark has not."""


def regex_of_lark(grammar: str) -> str:
    """A regular expression for the texts of a grammar that llguidance takes. Raises NotRegular."""
    rules = dict[str, Tokens]()
    ignored = list[Tokens]()
    tokens = list(_tokens(grammar))
    at = 0
    while at < len(tokens):
        kind, text = tokens[at]
        end = next((i for i in range(at + 1, len(tokens)) if tokens[i][0] in ("head", "statement")), len(tokens))
        body = tokens[at + 1 : end]
        if kind == "head":
            rules[text.strip(" \t:!?")] = body
        elif text == "%ignore":
            ignored.append(body)
        elif text == "%import":
            rules |= _imported(body)
        else:
            raise NotRegular(text)
        at = end
    return _Expression(rules, ignored).of("start")


def _tokens(grammar: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(grammar):
        found = _TOKEN.match(grammar, at)
        if found is None:
            raise NotRegular(grammar[at:][:20])
        if found.lastgroup != "space":
            yield found.lastgroup or "", found[0]
        at = found.end()


def _imported(body: Tokens) -> Mapping[str, Tokens]:
    """`common.X`, `common.X -> Y` or `common (X, Y)`."""
    names = [text for kind, text in body if kind == "name"]
    if names[:1] != ["common"] or not set(names[1:2]) <= _COMMON.keys():
        raise NotRegular("%import")
    if ("mark", "->") in body:
        return {names[2]: [("common", names[1])]}
    return {name: [("common", name)] for name in names[1:]}


class _Expression:
    """Writes rules out as expressions."""

    def __init__(self, rules: Mapping[str, Tokens], ignored: list[Tokens]) -> None:
        self._rules, self._known = rules, dict[str, str]()
        self._open: list[str] = []  # rules that are being written
        self._tokens: Tokens = []
        self._at, self._num_chars = 0, 0
        self._skipped = ""  # what may stand before a terminal of a rule
        texts = [self._all(tokens) for tokens in ignored]
        self._skipped = f"(?:{'|'.join(texts)})*" if texts else ""

    def of(self, name: str) -> str:
        """The expression of a rule or terminal, a group."""
        if name in self._open or name not in self._rules:
            raise NotRegular(name)
        if name not in self._known:
            self._open.append(name)
            self._known[name] = self._all(self._rules[name])
            self._open.pop()
        self._num_chars += len(self._known[name])
        if self._num_chars > _MAX_CHARS:
            raise NotRegular("is too large")
        return self._known[name]

    def _all(self, tokens: Tokens) -> str:
        outer = self._tokens, self._at
        self._tokens, self._at = tokens, 0
        text = self._either()
        if self._at < len(tokens):
            raise NotRegular(tokens[self._at][1])
        self._tokens, self._at = outer
        return text

    def _next(self) -> str:
        """The next mark, or ""."""
        kind, text = self._tokens[self._at] if self._at < len(self._tokens) else ("", "")
        return text if kind == "mark" else ""

    def _took(self, *marks: str) -> str:
        """The next mark, if it is one of these, which is then over."""
        found = self._next()
        self._at += found in marks
        return found if found in marks else ""

    def _either(self) -> str:
        options = [self._sequence()]
        while self._took("|"):
            options.append(self._sequence())
        return f"(?:{'|'.join(options)})"

    def _sequence(self) -> str:
        parts = list[str]()
        while self._at < len(self._tokens) and self._next() not in ("|", ")", "]"):
            if self._took("->"):
                self._at += 1
            else:
                parts.append(self._times(self._one()))
        return "".join(parts)

    def _times(self, text: str) -> str:
        if mark := self._took("?", "*", "+"):
            return f"(?:{text}){mark}"
        if self._took("~"):
            low = self._number()
            return f"(?:{text}){{{low},{self._number()}}}" if self._took("..") else f"(?:{text}){{{low}}}"
        if self._took("{"):
            low = self._number()
            high = f",{self._number()}" if self._took(",") else ""
            self._expect("}")
            return f"(?:{text}){{{low}{high}}}"
        return text

    def _number(self) -> str:
        if self._next() == "}":
            return ""
        self._at += 1
        return self._tokens[self._at - 1][1]

    def _expect(self, mark: str) -> None:
        if not self._took(mark):
            raise NotRegular(mark)

    def _one(self) -> str:
        if self._took("("):
            text = self._either()
            self._expect(")")
            return text
        if self._took("["):
            text = self._either()
            self._expect("]")
            return f"{text}?"
        kind, text = self._tokens[self._at]
        self._at += 1
        if kind == "name" and not text.lstrip("_")[:1].isupper():
            return self.of(text)
        return self._before_terminal() + self._terminal(kind, text)

    def _before_terminal(self) -> str:
        is_inside = bool(self._open) and self._open[-1].lstrip("_")[:1].isupper()
        return "" if is_inside else self._skipped

    def _terminal(self, kind: str, text: str) -> str:
        match kind:
            case "common":
                return f"(?:{_COMMON[text]})"
            case "name":
                return self.of(text)
            case "string" if self._took(".."):
                self._at += 1
                return f"[{_escaped(text)}-{_escaped(self._tokens[self._at - 1][1])}]"
            case "string":
                return f"(?i:{_escaped(text)})" if text.endswith("i") else f"(?:{_escaped(text)})"
            case "regex":
                return _group(text)
        raise NotRegular(text)


def _escaped(string: str) -> str:
    """A string of a grammar as an expression."""
    quoted = re.sub(r"\\x([0-9a-fA-F]{2})", r"\\u00\1", string.removesuffix("i"))
    try:
        return re.sub(r"[][\\^$.|?*+(){}/-]", r"\\\g<0>", json.loads(quoted, strict=False)).replace("\n", r"\n")
    except ValueError:
        raise NotRegular(string) from None


def _group(regex: str) -> str:
    """An expression of a grammar, with its flags, as a group."""
    inner, _, flags = regex[1:].rpartition("/")
    if not set(flags) <= _FLAGS:
        raise NotRegular(regex)
    inner = re.sub(r"\\(.)", lambda found: "/" if found[1] == "/" else found[0], inner)
    inner = re.sub(r"(?<!\\)\(\?P?<(?![=!])[^>]*>", "(?:", inner)  # a name may be there once alone
    return f"(?{''.join(sorted(flags))}:{inner})"
