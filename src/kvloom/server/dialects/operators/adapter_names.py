"""The form of an adapter's name."""

import re

from kvloom.contract.errors import BadRequest
from kvloom.server.dialects.triton.verbs import check_model_name

_NAME = re.compile(r"[\w\-.:/]{1,128}\Z")


def check_name(name: str) -> None:
    """Raises BadRequest."""
    if not _NAME.match(name):
        raise BadRequest("lora_name", "must be 1 to 128 letters, digits or any of _ - . : /")
    check_model_name(name, "lora_name")
