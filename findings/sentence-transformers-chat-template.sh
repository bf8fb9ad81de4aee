#!/usr/bin/env bash
# Expected: SentenceTransformer(folder).encode("hello") embeds the tokens of "hello", whatever else the tokenizer has.
# Happens: where the tokenizer has a chat template, the text becomes a user's message, and what is embedded is the text
# that the template makes of it. So an embedding model that is trained on a chat model's folder embeds other tokens than
# its texts, and so does another program that reads the saved folder; only `message` in modality_config of
# sentence_bert_config.json tells it.
# sentence-transformers 6.2.0, transformers 5.24.0, torch 2.13.0, run 2026-11-27:
#   without a template: 'hello'
#   with one: '<user> hello'
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0 sentence-transformers==6.2.0
cd "$work"
env/bin/python - <<'PY' 2>/dev/null
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.base.modules.transformer import Transformer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2Model

letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
bytes_only = Tokenizer(models.BPE(letters, []))
bytes_only.pre_tokenizer, bytes_only.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
Qwen2Model(Qwen2Config(vocab_size=300, num_key_value_heads=2, **sizes)).save_pretrained("model")
template = "{% for message in messages %}<user> {{ message['content'] }}{% endfor %}"
found = {}
for name, own in (("without a template", None), ("with one", template)):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only, pad_token="!")
    tokenizer.chat_template = own
    tokenizer.save_pretrained("model")
    model = SentenceTransformer(modules=[Transformer("model"), Pooling(16)])
    found[name] = tokenizer.decode(model.preprocess(["hello"])["input_ids"][0].tolist())
    print(f"{name}: {found[name]!r}")
assert found == {"without a template": "hello", "with one": "<user> hello"}
PY
