"""The folder of a small vision-language model of SmolVLM's family; its tokens are bytes and a few for images."""

import json
from pathlib import Path
from typing import Any

from tests.support.models.byte_folder import make_byte_folder

IMAGE, AROUND, GLOBAL = 257, 258, 259
SPECIAL = {IMAGE: "<image>", AROUND: "<fake_token_around_image>", GLOBAL: "<global-img>", 260: "<end_of_utterance>"}
VOCAB_SIZE = 264
PATCH, SIDE = 14, 56  # pixels of a patch and of a tile; a tile is 4 tokens, because 2 x 2 patches form one
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>:{% endif %}"
)


def make_seeing_folder(folder: Path, template: str = TEMPLATE) -> Path:
    """Writes the tokenizer's and the processor's files; seeing_weights.py adds the rest."""
    make_byte_folder(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{"id": id, "content": text, **flags} for id, text in SPECIAL.items()]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<eos>",
        "processor_class": "Idefics3Processor", "chat_template": template,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    (folder / "preprocessor_config.json").write_text(json.dumps(_preprocessing()))
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": "Idefics3Processor", "image_seq_len": 4})
    )
    return folder


def _preprocessing() -> dict[str, Any]:
    return {
        "image_processor_type": "Idefics3ImageProcessor", "processor_class": "Idefics3Processor",
        "do_convert_rgb": True, "do_image_splitting": True, "do_normalize": True, "do_pad": True, "do_rescale": True,
        "do_resize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 1,
        "max_image_size": {"longest_edge": SIDE}, "size": {"longest_edge": 2 * SIDE}, "rescale_factor": 1 / 255,
    }  # fmt: skip
