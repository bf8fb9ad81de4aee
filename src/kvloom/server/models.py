"""Models: which services there are, by name."""

from collections.abc import Iterator, Sequence

from kvloom.engine.errors import BadRequest, NotFound
from kvloom.server.admission import Admission
from kvloom.server.generation import GenerationService
from kvloom.server.options import WireOptions


class Models:
    """The served models; the first is the default. LoRA adapters join and leave them by name."""

    def __init__(self, services: Sequence[GenerationService], options: WireOptions | None = None) -> None:
        self._by_name = {service.name: service for service in services}
        self.default = services[0]
        self.options = options or WireOptions()
        self._adapters: dict[str, GenerationService] = {}
        self._unloaded: set[str] = set()  # names of adapters that are gone: the default must not answer for them

    def __iter__(self) -> Iterator[GenerationService]:
        """Without adapters: one service an engine."""
        return iter(self._by_name.values())

    @property
    def admission(self) -> Admission:
        """The places that all models share."""
        return self.default.admission

    def get(self, name: str) -> GenerationService:
        """The model of a URL. Raises NotFound."""
        found = self._by_name.get(name) or self._adapters.get(name)
        if found is None:
            names = ", ".join(repr(service.name) for service in self.served)
            raise NotFound(f"the model {name!r} does not exist; this server has {names}")
        return found

    def choose(self, name: str | None) -> GenerationService:
        """The model that a request names. Raises BadRequest without a name, NotFound of a wrong one."""
        if name is None and self.options.validates_model:
            raise BadRequest("model", "is required")
        is_known = name in self._by_name or name in self._adapters or name in self._unloaded
        if name is None or (not is_known and not self.options.validates_model):
            return self.default
        return self.get(name)

    # -- adapters

    def of_adapter(self, name: str | None) -> GenerationService:
        """The default model, or the adapter that a request without a model names. Raises NotFound."""
        return self.default if name is None else self.get(name)

    @property
    def served(self) -> list[GenerationService]:
        """Every name that a request may give: the models, then their adapters."""
        return [*self._by_name.values(), *self._adapters.values()]

    def base(self, name: str) -> GenerationService:
        """Raises NotFound when no model, or only an adapter, has this name."""
        if name in self._adapters:
            raise NotFound(f"{name!r} is an adapter, not a model")
        return self.get(name)

    def check_adapter_name(self, name: str, is_replacing: bool) -> None:
        """Raises BadRequest when the name is taken; by an adapter that is to be replaced it may be."""
        if name in self._by_name:
            raise BadRequest("lora_name", f"{name!r} is the name of a model")
        if name in self._adapters and not is_replacing:
            raise BadRequest("lora_name", f"{name!r} is loaded already; unload it first, or set load_inplace to true")

    def put_adapter(self, service: GenerationService) -> GenerationService | None:
        """Serve it by its name, which check_adapter_name has passed. Whom it replaces."""
        before = self._adapters.get(service.name)
        self._adapters[service.name] = service
        self._unloaded.discard(service.name)
        return before

    def pop_adapter(self, name: str) -> GenerationService:
        """Requests of this name are refused from now on. Raises NotFound."""
        if name not in self._adapters:
            raise NotFound(f"the adapter {name!r} does not exist")
        self._unloaded.add(name)
        return self._adapters.pop(name)
