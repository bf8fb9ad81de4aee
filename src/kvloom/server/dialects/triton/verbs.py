"""Verbs of routes: path segments behind a model's name, which therefore may not contain them."""

from kvloom.contract.errors import BadRequest

VERBS = "versions|ready|config|stats|infer|generate|generate_stream|getSlotCount|stopInfer"


def check_model_name(name: str, field: str) -> None:
    """Raises BadRequest naming `field` when the name cannot stand in a path: x/ready would be a route of x."""
    found = set(name.split("/")[1:]) & set(VERBS.split("|"))
    if found:
        raise BadRequest(field, f"{name!r} cannot be told from a route of /v2/models: it holds '/{min(found)}'")
