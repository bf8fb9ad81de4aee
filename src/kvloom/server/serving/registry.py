"""Models: the services of a server, by name."""

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvloom.contract.errors import BadRequest, NotFound
from kvloom.server.serving.admission import Admission
from kvloom.server.serving.options import WireOptions
from kvloom.server.serving.pictures.service import PictureService
from kvloom.server.serving.service import GenerationService


@dataclass(frozen=True, slots=True)
class AdapterNames:
    """LoRA adapters, each (name, path, number, name of the model); and names of adapters that were unloaded."""

    loaded: tuple[tuple[str, str, int, str], ...]
    unloaded: frozenset[str]


class Models:
    """The served models; the first is the default. LoRA adapters join and leave them by name.

    `pictures`: models that make pictures, by name; None where this process knows only their names. `admission`: the
    slots that all language models share. A model must be added before it is used.
    """

    def __init__(
        self,
        services: Sequence[GenerationService],
        options: WireOptions | None = None,
        pictures: Mapping[str, PictureService | None] | None = None,
        admission: Admission | None = None,
    ) -> None:
        self._by_name = {service.name: service for service in services}
        self._pictures = dict(pictures or {})
        self.admission = admission or services[0].admission
        self.options = options or WireOptions()
        self.started_s = time.time()  # seconds since the epoch; the date of entries without a file
        self._adapters: dict[str, GenerationService] = {}
        # held while loading and unloading, so that a name is not loaded twice at once
        self.adapters_lock = asyncio.Lock()
        self._unloaded: set[str] = set()  # names of unloaded adapters: the default model must not answer for them

    def __iter__(self) -> Iterator[GenerationService]:
        """Without adapters: one service an engine."""
        return iter(self._by_name.values())

    def add(self, service: GenerationService) -> None:
        """One more language model, behind the others; it has their admission."""
        self._by_name[service.name] = service

    def add_pictures(self, service: PictureService) -> None:
        """A model of `pictures` is loaded."""
        self._pictures[service.name] = service

    @property
    def default(self) -> GenerationService:
        """Raises NotFound when all models make pictures."""
        for service in self:
            return service
        raise NotFound(f"this server has no language model; {_of_pictures(self._pictures)}")

    @property
    def num_active(self) -> int:
        """Requests served and waiting, of all models."""
        return self.admission.num_active + sum(each.admission.num_active for each in self.pictures)

    def get(self, name: str) -> GenerationService:
        """The model of a URL. Raises NotFound."""
        found = self._by_name.get(name) or self._adapters.get(name)
        if found is None and name in self._pictures:
            raise NotFound(_of_pictures([name]))
        if found is None:
            names = ", ".join(repr(service.name) for service in self.served)
            raise NotFound(f"the model {name!r} does not exist; this server has {names}")
        return found

    def choose(self, name: str | None) -> GenerationService:
        """The model that a request names. Raises BadRequest without a name, NotFound for an unknown one."""
        if name is None and self.options.validates_model:
            raise BadRequest("model", "is required")
        is_known = name in self.names or name in self._unloaded
        if name is None or (not is_known and not self.options.validates_model):
            return self.default
        return self.get(name)

    # -- models that make pictures

    @property
    def pictures(self) -> list[PictureService]:
        return [service for service in self._pictures.values() if service is not None]

    @property
    def picture_names(self) -> tuple[str, ...]:
        return tuple(self._pictures)

    def choose_pictures(self, name: str | None) -> PictureService:
        """The picture model that a request names, as `choose`. Raises BadRequest, NotFound."""
        if name is None and self.options.validates_model:
            raise BadRequest("model", "is required")
        found = next((each for each in self.pictures if each.name == name), None)
        if found is not None:
            return found
        names = ", ".join(map(repr, self._pictures)) or "none"
        if name in self.names:
            raise BadRequest(
                "model", f"{name!r} is a language model; of those that make pictures this server has {names}"
            )
        if not self._pictures or self.options.validates_model:
            raise NotFound(f"the model {name!r} does not exist; of those that make pictures this server has {names}")
        return self.pictures[0]

    # -- adapters

    def of_adapter(self, name: str | None) -> GenerationService:
        """The adapter of this name, or the default model. Raises NotFound."""
        return self.default if name is None else self.get(name)

    @property
    def names(self) -> set[str]:
        """Every model name that a request may use, of all kinds."""
        return {*self._by_name, *self._adapters, *self._pictures}

    @property
    def served(self) -> list[GenerationService]:
        """The language models, then their adapters."""
        return [*self._by_name.values(), *self._adapters.values()]

    def base(self, name: str) -> GenerationService:
        """The model of this name. Raises NotFound, also for an adapter."""
        if name in self._adapters:
            raise NotFound(f"{name!r} is an adapter, not a model")
        return self.get(name)

    def check_adapter_name(self, name: str, is_replacing: bool) -> None:
        """Raises BadRequest when the name is taken; an adapter's name is free if `is_replacing`."""
        if name in self._by_name or name in self._pictures:
            raise BadRequest("lora_name", f"{name!r} is the name of a model")
        if name in self._adapters and not is_replacing:
            raise BadRequest("lora_name", f"{name!r} is loaded already; unload it first, or set load_inplace to true")

    def put_adapter(self, service: GenerationService) -> GenerationService | None:
        """Serve an adapter under its name, which check_adapter_name accepted. Returns the adapter that it replaces."""
        before = self._adapters.get(service.name)
        self._adapters[service.name] = service
        self._unloaded.discard(service.name)
        return before

    def adapter_names(self) -> AdapterNames:
        """For the Models of another process."""
        loaded = (
            (name, service.root, service.adapter, service.parent or "") for name, service in self._adapters.items()
        )
        return AdapterNames(tuple(loaded), frozenset(self._unloaded))

    def assume(self, names: AdapterNames) -> None:
        """Take over the adapters of another process's Models."""
        self._adapters = {
            name: self._by_name[model].with_adapter(name, path, number) for name, path, number, model in names.loaded
        }
        self._unloaded = set(names.unloaded)

    def pop_adapter(self, name: str) -> GenerationService:
        """Refuse requests of this name from now on. Raises NotFound."""
        if name not in self._adapters:
            raise NotFound(f"the adapter {name!r} does not exist")
        self._unloaded.add(name)
        return self._adapters.pop(name)


def _of_pictures(names: Iterable[str]) -> str:
    return f"{', '.join(map(repr, names))} makes pictures: POST /v1/images/generations"
