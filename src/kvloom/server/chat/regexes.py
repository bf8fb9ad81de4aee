r"""Regular expressions as JSON Schema's `pattern` (ECMA-262) reads them: \d and \w are ASCII, \s any white space."""

import re

_CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}
# an escape; with a `-` before it, which stands for itself (`[+-\d]`), unless it is of a set difference (`[\w--\d]`)
_ESCAPE = re.compile(r"(?P<dash>(?<!-)-)?\\(?P<name>[dDwW])|\\.", re.DOTALL)
_LARK_TOKEN = re.compile(r'(?://|#)[^\n]*|"(?:\\.|[^"\\\n])*"|(?P<regex>/(?:\\.|[^/\\\n])+/)')


def ascii_regex(pattern: str) -> str:
    """The same with Unicode classes made ASCII. An escape in a class becomes a nested class, as llguidance allows."""
    return _ESCAPE.sub(_ascii_class, pattern)


def ascii_lark(grammar: str) -> str:
    """A Lark grammar with the regular expressions of its terminals made ASCII."""
    return _LARK_TOKEN.sub(lambda token: ascii_regex(token[0]) if token["regex"] else token[0], grammar)


def lark_regex(pattern: str) -> str:
    """A regular expression as a terminal of a Lark grammar, made ASCII."""
    slashed = re.sub(r"\\.|/|\n", lambda found: _IN_LARK.get(found[0], found[0]), ascii_regex(pattern), flags=re.DOTALL)
    return f"/{slashed}/"


_IN_LARK = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


def _ascii_class(escape: re.Match[str]) -> str:
    if escape["name"] is None:
        return escape[0]
    return (r"\-" if escape["dash"] else "") + _CLASSES[escape["name"]]
