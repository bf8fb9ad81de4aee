#!/usr/bin/env bash
# Expected: a grammar is about bytes, so a mask allows every token with which the text can go on: before a name that a
# schema forces, "colour", the tokens "c", "co" and "colour" alike, and the model chooses how the name is cut.
# Happens: where text is forced, the mask has one token, the first of the cut that the tokenizer itself would make
# (compute_ff_tokens). The model does not choose the cut.
# llguidance 1.9.1, tokenizers 0.23.1, run 2026-11-28:
#   allowed before the name: ['colour'] of ['c', 'co', 'colour']
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check llguidance==1.9.1 tokenizers==0.23.1 numpy
cd "$work"
env/bin/python - <<'PY'
import json

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

vocabulary = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
merges = [("c", "o"), ("l", "o"), ("u", "r"), ("lo", "ur"), ("co", "lour")]
for pair in merges:
    vocabulary["".join(pair)] = len(vocabulary)
vocabulary["<end>"] = len(vocabulary)
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_special_tokens(["<end>"])
schema = {"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]}
grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=vocabulary["<end>"]), grammar)
for letter in '{"':
    matcher.consume_token(vocabulary[letter])
bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
begins = [name for name in ("c", "co", "colour") if bits[vocabulary[name]]]
print(f"allowed before the name: {begins} of ['c', 'co', 'colour']")
assert begins == ["colour"]
PY
