"""How a model stands in a path: also with slashes in its name, as published models have them."""

from starlette.convertors import Convertor, register_url_convertor

from kvloom.server.dialects.triton.verbs import VERBS


class _ModelName(Convertor[str]):
    """Segments up to the first that is a verb of these routes, so the order of the routes does not matter."""

    regex = rf"[^/]+(?:/(?!(?:{VERBS})(?:/|$))[^/]+)*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("model_name", _ModelName())
MODEL_PATH = "/v2/models/{model:model_name}"
