"""A Hugging Face folder with a byte-level tokenizer: token i is byte i, the last is <eos>. Others add the weights."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvloom.engine.text.gguf_tokenizer import build_fast_tokenizer

EOS = 256
VOCAB_SIZE = 257
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_byte_folder(folder: Path, specials: Sequence[str] = ("<eos>",), **config: Any) -> Path:
    """Writes the folder, with an empty file for the weights. `config`: fields of config.json besides eos_token_id."""
    eos_id = 255 + len(specials)
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = iter(range(256, 512))
    meta = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*(chr(b) if b in kept else chr(next(moved)) for b in range(256)), *specials],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * len(specials),
        "tokenizer.ggml.eos_token_id": eos_id,
    }
    folder.mkdir(parents=True, exist_ok=True)
    build_fast_tokenizer(meta, "test").save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": eos_id, **config}))
    (folder / "model.safetensors").touch()
    return folder
