"""Names of models and adapters, checked before anything is loaded: by a server, and by a fleet for its servers."""

from kvloom.contract.errors import BadRequest
from kvloom.server.config.settings import ServerConfig
from kvloom.server.dialects.operators.adapter_names import check_name
from kvloom.server.dialects.triton.verbs import check_model_name


def check_names(config: ServerConfig) -> None:
    """Raises BadRequest for a model's name that cannot be part of a path, or an adapter's malformed or taken one."""
    for name in config.names:
        check_model_name(name, "modelName")
    taken = {name: "is the name of a model" for name in config.names}
    for name, path in (module for card in config.models for module in card.lora_modules):
        try:
            check_name(name)
        except BadRequest as error:
            raise BadRequest("loraModules", f"{name}={path}: {error.problem}") from None
        if name in taken:
            raise BadRequest("loraModules", f"{name}={path}: {name!r} {taken[name]}")
        taken[name] = "is the name of another adapter"
