#!/usr/bin/env bash
# Expected: decode(encode("ñ")) is "ñ" when "ñ" is an added token: the library finds it in texts by that spelling.
# Happens: the ByteLevel decoder takes added tokens, too, for letters of GPT-2's byte alphabet. "ñ" is the letter of
# byte 0xF1, which alone is no UTF-8, so it comes out as U+FFFD. Tokens with a letter outside of the alphabet are spared:
# "ño " with its space comes out right.
# tokenizers 0.23.3, run 2026-11-27:
#   'ñ' -> '\ufffd', 'ño ' -> 'ño '
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check tokenizers==0.23.3
"$work/env/bin/python" - <<'PY'
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_tokens([AddedToken("ñ", normalized=False), AddedToken("ño ", normalized=False)])
short, long = (tokenizer.decode(tokenizer.encode(text).ids) for text in ("ñ", "ño "))
print(f"'ñ' -> {ascii(short)}, 'ño ' -> {long!r}")
assert (short, long) == ("\ufffd", "ño ")
PY
