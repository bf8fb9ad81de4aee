"""Models: which services there are, by name."""

from collections.abc import Iterator, Sequence

from kvloom.engine.errors import BadRequest, NotFound
from kvloom.server.admission import Admission
from kvloom.server.generation import GenerationService
from kvloom.server.options import WireOptions


class Models:
    """The served models; the first is the default."""

    def __init__(self, services: Sequence[GenerationService], options: WireOptions | None = None) -> None:
        self._by_name = {service.name: service for service in services}
        self.default = services[0]
        self.options = options or WireOptions()

    def __iter__(self) -> Iterator[GenerationService]:
        return iter(self._by_name.values())

    @property
    def admission(self) -> Admission:
        """The places that all models share."""
        return self.default.admission

    def get(self, name: str) -> GenerationService:
        """The model of a URL. Raises NotFound."""
        if name not in self._by_name:
            raise NotFound(f"the model {name!r} does not exist; this server has {', '.join(map(repr, self._by_name))}")
        return self._by_name[name]

    def choose(self, name: str | None) -> GenerationService:
        """The model that a request names. Raises BadRequest without a name, NotFound of a wrong one."""
        if name is None and self.options.validates_model:
            raise BadRequest("model", "is required")
        if name is None or (name not in self._by_name and not self.options.validates_model):
            return self.default
        return self.get(name)
