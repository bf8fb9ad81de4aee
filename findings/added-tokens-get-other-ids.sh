#!/usr/bin/env bash
# Expected: a token of added_tokens_decoder in tokenizer_config.json, {"300": {"content": "<x>"}}, has the id 300, which
# is the row of the embedding that was trained for it; or a tokenizer that cannot have it there says so.
# Happens: where tokenizer.json lacks the token, it gets the next free id, and the numbers in the file are only an order.
# Nothing is said; the model reads another token's embedding, or none.
# transformers 5.24.0, tokenizers 0.23.3, run 2026-11-27:
#   stated {299: '<y>', 300: '<x>'}, given {'<x>': 4, '<y>': 3}
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check transformers==5.24.0 tokenizers==0.23.3
cd "$work"
env/bin/python - <<'PY' 2>/dev/null
import json

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

bare = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
bare.pre_tokenizer = pre_tokenizers.Whitespace()
bare.save("tokenizer.json")
stated = {299: "<y>", 300: "<x>"}
flags = {"special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
decoder = {str(id): {"content": text, **flags} for id, text in stated.items()}
with open("tokenizer_config.json", "w") as file:
    json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": decoder}, file)
with open("config.json", "w") as file:
    json.dump({"model_type": "llama"}, file)
made = AutoTokenizer.from_pretrained(".")
given = {text: made.convert_tokens_to_ids(text) for text in ("<x>", "<y>")}
print(f"stated {stated}, given {given}")
assert given == {"<x>": 4, "<y>": 3}
PY
