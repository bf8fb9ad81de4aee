"""Arguments of a tool call that may be cut off, read with the parser of Anthropic's client. Pure."""

from typing import Any

import jiter
import msgspec


def object_so_far(text: str) -> dict[str, Any]:
    """The JSON object that `text` is or begins, without a string or word that is cut; {} where it is none."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError):
        pass
    try:
        found = jiter.from_json(text.encode(), partial_mode=True, allow_inf_nan=False)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
