"""Settings: a JSON object of another tool, whose fields are read with checks that name them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvloom.checkpoints.fields import unknown_field
from kvloom.checkpoints.quantized.rotations import is_target
from kvloom.contract.errors import ModelError

GROUP = 32  # numbers that share a scale in memory: a file's groups are multiples of it
LARGEST = 1 << 20


class Settings:
    """A JSON object; `where` begins every message."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self.where = values, where

    def get(self, name: str, default: object = None) -> Any:
        return self._values.get(name, default)

    def only_known(self, *known: str, **plain: tuple[object, ...]) -> None:
        """Raises ModelError for a field that fields.unknown_field finds."""
        name = unknown_field(self._values, known, plain)
        if name is not None:
            raise ModelError(f"{self.where}: {name[:80]} is not supported, got {self._values[name]!r:.80}")

    def one_of(self, name: str, known: tuple[object, ...], default: object) -> Any:
        value = self._values.get(name)
        value = default if value is None else value
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in known):
            raise ModelError(
                f"{self.where}: {name} {value!r:.80} is not supported; known: {', '.join(map(repr, known))}"
            )
        return value

    def group(self, name: str, default: int) -> int | None:
        value = self._values.get(name)
        value = default if value is None else value
        if value == -1:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= LARGEST or value % GROUP:
            raise ModelError(f"{self.where}: {name} must be -1 or a multiple of {GROUP}, got {value!r:.80}")
        return value

    def items(self) -> Iterable[tuple[str, Any]]:
        return self._values.items()

    def inner(self, name: str) -> "Settings":
        value = self._values.get(name) or {}
        if not isinstance(value, Mapping):
            raise ModelError(f"{self.where}: {name} must be an object, got {value!r:.80}")
        return Settings(value, f"{self.where}.{name}")

    def without(self, *names: str) -> "Settings":
        return Settings({name: value for name, value in self._values.items() if name not in names}, self.where)

    def each(self, name: str) -> Iterator["Settings"]:
        """The objects in an object of objects."""
        inner = self.inner(name)
        for key in inner._values:
            yield inner.inner(key)

    def listed(self, name: str) -> Iterator["Settings"]:
        """The objects in a list of objects."""
        values = self._values.get(name) or []
        if not isinstance(values, list) or not all(isinstance(one, Mapping) for one in values):
            raise self.refused(name, f"must be a list of objects, got {values!r:.80}")
        for value in values:
            yield Settings(value, f"{self.where}.{name}")

    def targets(self, name: str) -> tuple[str, ...]:
        value = self._values.get(name) or []
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(one, str) and is_target(one) for one in value):
            raise self.refused(name, f"must be names of linears, 're:.*name$' or 'Linear', got {value!r:.80}")
        return tuple(value)

    def target(self, target: str) -> str:
        """A field's name that names linears (rotations.is_target)."""
        if not is_target(target):
            raise ModelError(f"{self.where}: {target.removeprefix('re:')!r:.80} names no linears that are known here")
        return target

    @property
    def name(self) -> str:
        return self.where.rsplit(".", 1)[-1]

    def refused(self, name: str, problem: str) -> ModelError:
        return ModelError(f"{self.where}: {name} {problem}")
