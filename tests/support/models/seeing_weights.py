"""Configuration and random weights of the model of seeing_folder.py."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.models.seeing_folder import IMAGE, PATCH, SIDE, VOCAB_SIZE, make_seeing_folder


def make_seeing_model(folder: Path) -> Path:
    """Writes the whole folder, with weights in bfloat16."""
    make_seeing_folder(folder)
    torch.manual_seed(0)
    model = transformers.Idefics3ForConditionalGeneration(_config()).to(torch.bfloat16)
    for name, weight in model.named_parameters():  # larger weights, so that images visibly change answers
        if "vision" in name or "connector" in name:
            weight.data.mul_(4)
    model.save_pretrained(folder)
    return folder


def _config() -> Any:
    text = {
        "model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 2048,
        "eos_token_id": 256, "bos_token_id": None, "pad_token_id": 256,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": SIDE, "patch_size": PATCH,
    }  # fmt: skip
    return transformers.Idefics3Config(
        text_config=text, vision_config=vision, scale_factor=2, image_token_id=IMAGE, pad_token_id=256
    )
