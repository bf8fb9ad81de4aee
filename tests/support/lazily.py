"""Large libraries that few tests use: every process that collects the tests would load them, and most need none."""

import importlib.util
from importlib import import_module
from typing import Any


class Lazily:
    """A module that is loaded when something is first taken from it.

    importlib's LazyLoader would not do: pytest looks for marks on all that a test's module has, which loads what that
    one makes.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # as pytest asks of everything that it finds
            raise AttributeError(name)
        return getattr(import_module(self._name), name)


def lazily(name: str) -> Any:
    assert importlib.util.find_spec(name) is not None, f"{name} is not installed"
    return Lazily(name)
