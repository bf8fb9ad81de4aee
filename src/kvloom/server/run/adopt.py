"""`kvloom pull PATH`: checks a user's own model and lists it by name."""

import os
import re
from pathlib import Path

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.demo_models import MODELS, link
from kvloom.contract.errors import ModelError
from kvloom.engine.text.tokenizer import load_tokenizer

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # owner/model


def adopt(wanted: str) -> str:
    """Check a user's own model and list it. Returns its name. Raises ModelError."""
    if wanted.startswith(("http://", "https://")):
        raise ModelError(
            f"{wanted} is a URL, and nothing here verifies what it gives; fetch the file, then pull its path"
        )
    path = Path(os.path.expanduser(wanted))
    if not path.exists() and _HUB_NAME.fullmatch(wanted):
        raise ModelError(
            f"{wanted} is no name known here; fetch a hub's model with the hub's own tool, as in `pip install "
            f"huggingface_hub` and `hf download {wanted} --local-dir {path.name}`, then: kvloom pull {path.name}"
        )
    if not path.exists():
        raise ModelError(f"no model is named {wanted!r}; known are {', '.join(MODELS)}, or the path of a model")
    open_checkpoint(path)
    load_tokenizer(path)
    return link(path)
