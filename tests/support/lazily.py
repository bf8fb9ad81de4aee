"""Lazy imports of large libraries: every process collects all tests, but few tests need these libraries."""

import importlib.util
from importlib import import_module
from typing import Any


class Lazily:
    """A module that is imported on its first attribute access.

    importlib's LazyLoader is not enough: pytest looks for marks on every object in a test module, which would import
    the library.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for these on everything that it collects
            raise AttributeError(name)
        return getattr(import_module(self._name), name)


def lazily(name: str) -> Any:
    assert importlib.util.find_spec(name) is not None, f"{name} is not installed"
    return Lazily(name)
