"""`kvloom pull PATH`: a model of the user's own, checked and listed."""

from pathlib import Path

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.demo_models import MODELS, link
from kvloom.contract.errors import ModelError
from kvloom.engine.text.tokenizer import load_tokenizer


def adopt(wanted: str) -> str:
    """The name by which a model of the user's own is listed from now on; it is checked first. Raises ModelError."""
    if wanted.startswith(("http://", "https://")):
        raise ModelError(
            f"{wanted} is a URL, and nothing here verifies what it gives; fetch the file, then pull its path"
        )
    path = Path(wanted).expanduser()
    if not path.exists():
        raise ModelError(f"no model is named {wanted!r}; known are {', '.join(MODELS)}, or the path of a model")
    open_checkpoint(path)
    load_tokenizer(path)
    return link(path)
