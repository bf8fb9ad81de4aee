#!/usr/bin/env bash
# Expected: a token that compute_bitmask allows can be consumed. The answer must begin with a space; the vocabulary has
# " yes" and " no", but no token of a space alone, so a tokenizer has no ids for " " and returns none.
# Happens: the mask allows the tokens that follow the space, "yes" and "no", and not the two that hold it; consuming what
# it allows ends the matcher with "token "yes" doesn't satisfy the grammar". WordPiece vocabularies are like that. With a
# token of a space alone, even one that is never to be chosen, the mask is right.
# llguidance 1.9.1, run 2026-11-27:
#   without a space: allowed ['yes', 'no'], error after it: True
#   with a space: allowed [' yes', ' no'], error after it: False
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check llguidance==1.9.1
"$work/env/bin/python" - <<'PY'
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper


class Longest:
    """Of all tokens that the text may begin with the longest one each time; ends where there is none."""

    eos_token_id, bos_token_id, special_token_ids = 0, None, [0]

    def __init__(self, tokens):
        self.tokens = tokens

    def __call__(self, text):
        if not isinstance(text, str):
            raise TypeError("takes text")
        rest, ids = text.encode(), []
        while begins := [token for token in self.tokens[1:] if token and rest.startswith(token)]:
            ids.append(self.tokens.index(max(begins, key=len)))
            rest = rest[len(self.tokens[ids[-1]]) :]
        return ids


def allowed(tokens):
    tokenizer = LLTokenizer(TokenizerWrapper(Longest(tokens)), eos_token=[0])
    matcher = LLMatcher(tokenizer, 'start: " yes" | " no"', log_level=0)
    mask = matcher.compute_bitmask()
    ids = [i for i in range(len(tokens)) if mask[i // 8] >> i % 8 & 1 and tokens[i] != b" "]
    matcher.consume_token(ids[0])
    matcher.compute_bitmask()
    return [tokens[i].decode() for i in ids], matcher.is_error()


words = [b"</s>", b" yes", b" no", b"yes", b"no"]
without, error = allowed(words)
print(f"without a space: allowed {without}, error after it: {error}")
with_space, fine = allowed([*words, b" "])
print(f"with a space: allowed {with_space}, error after it: {fine}")
assert (without, error, with_space, fine) == (["yes", "no"], True, [" yes", " no"], False)
PY
