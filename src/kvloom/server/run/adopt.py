"""`kvloom pull PATH`: checks a user's own model and lists it by name."""

import os
from pathlib import Path

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.demo_models import MODELS, link
from kvloom.contract.errors import ModelError
from kvloom.engine.text.tokenizer import load_tokenizer


def adopt(wanted: str) -> str:
    """Check a user's own model and list it. Returns its name. Raises ModelError."""
    if wanted.startswith(("http://", "https://")):
        raise ModelError(
            f"{wanted} is a URL, and nothing here verifies what it gives; fetch the file, then pull its path"
        )
    path = Path(os.path.expanduser(wanted))
    if not path.exists():
        raise ModelError(f"no model is named {wanted!r}; known are {', '.join(MODELS)}, or the path of a model")
    open_checkpoint(path)
    load_tokenizer(path)
    return link(path)
