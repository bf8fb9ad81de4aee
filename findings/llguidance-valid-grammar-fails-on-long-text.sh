#!/usr/bin/env bash
# Expected: a grammar that validate_grammar takes can be followed to its end; what is too large is refused before the
# first token.
# Happens: regular expressions are built while the text comes. A negated one ("no x with y 21 letters behind it") is
# valid, follows the text for 33 letters, and then the matcher is in an error state, in the middle of an answer. A server
# has to end that answer with an error, although it checked the grammar.
# llguidance 1.9.1, run 2026-11-28:
#   valid: True; of 58 letters 33 were taken, then "lexer error: too many expressions constructed"
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check llguidance==1.9.1
cd "$work"
env/bin/python - <<'PY' 2>/dev/null
from llguidance import LLMatcher, LLTokenizer

TEXT = "hello world xx ab x yx xy hello hello world xx ab x yx xy "
grammar = LLMatcher.grammar_from_lark("start: A\nA: /[a-z ]*/ & ~/(?s:.*)x.{20}y(?s:.*)/")
tokenizer = LLTokenizer("byte")
valid = LLMatcher.validate_grammar(grammar, tokenizer) == ""
matcher, taken = LLMatcher(tokenizer, grammar), 0
for byte in TEXT.encode():
    matcher.compute_bitmask()
    if matcher.get_error() or not matcher.consume_token(byte):
        break
    taken += 1
error = matcher.get_error().splitlines()[0]
print(f'valid: {valid}; of {len(TEXT)} letters {taken} were taken, then "{error}"')
assert (valid, taken < len(TEXT), "too many expressions" in error) == (True, True, True)
PY
